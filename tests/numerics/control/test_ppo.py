"""One update: hand-worked losses, the stored log-probabilities, Adam as torch's own, and the same bits twice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from gradserve.compute.engine.control.normalise import OBSERVATIONS
from gradserve.compute.engine.control.ppo import Batch, approximate_kl, ppo_update, squared_error, surrogate
from gradserve.compute.engine.control.rollout import Tensors, rollout
from gradserve.wire.control import EnvSpec, PPOConfig, RolloutSpec, SpaceSpec
from gradserve.wire.errors import Invalid
from tests.numerics.control.toys import RANDOM_WALK, mlp, mlp_weights

TWO = SpaceSpec("discrete", nvec=(2,))
ONE_BOX = SpaceSpec("box", (1,), low=(-1.0,), high=(1.0,))


def config(**changes: Any) -> PPOConfig:
    return msgspec.structs.replace(PPOConfig(), **changes)


def transitions(n: int = 24, seed: int = 0, terminal: bool = True) -> Tensors:
    """Random ones of two actions, n steps of one environment; the stored log-probs are those of no policy at hand."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(n, 1, generator=draw)
    return {
        "observations": torch.randn(n, 1, 3, generator=draw),
        "actions": torch.randint(0, 2, (n, 1, 1), generator=draw).float(),
        "logprobs": -0.2 - torch.rand(n, 1, generator=draw),
        "values": values,
        "next_values": torch.zeros(n, 1) if terminal else torch.cat([values[1:], values[:1]]),
        "rewards": torch.randn(n, 1, generator=draw),
        "terminated": torch.full((n, 1), terminal),
        "truncated": torch.zeros(n, 1, dtype=torch.bool),
        "valid": torch.ones(n, 1, dtype=torch.bool),
    }


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.1, 2.0, 2.2, 2.0),
        (1.5, 2.0, 2.4, 0.0),  # gained enough: held at 1.2
        (0.5, 2.0, 1.0, 2.0),  # lost by accident: not held
        (1.5, -2.0, -3.0, -2.0),  # worse and likelier: not held
        (0.5, -2.0, -1.6, 0.0),  # already unlikely: held at 0.8
        (0.9, -2.0, -1.8, -2.0),
    ],
)
def test_the_surrogate_by_hand(ratio: float, advantage: float, objective: float, slope: float) -> None:
    log_ratio = torch.tensor([ratio]).log().requires_grad_()
    loss = surrogate(log_ratio, torch.tensor([advantage]), config(normalise_advantage=False))
    (gradient,) = torch.autograd.grad(loss, log_ratio)
    assert loss.item() == pytest.approx(-objective)
    assert gradient.item() == pytest.approx(-slope * ratio)  # d/dlog r = r d/dr


def test_advantages_are_normalised_within_the_minibatch() -> None:
    found = surrogate(torch.zeros(3), torch.tensor([1.0, 2.0, 6.0]), config())
    # mean 3, unbiased deviation sqrt(7): -2, -1, 3 over it; at r = 1 their mean is 0
    assert found.item() == pytest.approx(0, abs=1e-6)
    tilted = surrogate(torch.tensor([0.0, 0.0, 0.1]), torch.tensor([1.0, 2.0, 6.0]), config())
    assert tilted.item() == pytest.approx(-(torch.tensor(0.1).exp().item() - 1) * 3 / 7**0.5 / 3, rel=1e-5)


def test_one_advantage_stays_what_it_is() -> None:
    assert surrogate(torch.zeros(1), torch.tensor([3.0]), config()).item() == -3.0


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope"),
    [
        (3.0, None, 4.0, 4.0),  # (3 - 1)^2, no factor of one half
        (3.0, 0.5, 4.0, 4.0),  # held at 2.5 it would be 2.25: the greater counts
        (1.2, 0.5, 0.25, 0.0),  # held at 1.5, from 2: 0.25 exceeds 0.04, and the hold has no slope
        (1.8, 0.5, 0.64, 1.6),
    ],
)
def test_the_value_loss_by_hand(value: float, clip: float | None, loss: float, slope: float) -> None:
    """The stored value is 2 and the return 1."""
    one = torch.ones(1)
    batch = Batch(one, one, one, values=2 * one, advantages=one, returns=one)
    values = torch.tensor([value], requires_grad=True)
    found = squared_error(values, batch, clip)
    (gradient,) = torch.autograd.grad(found, values, materialize_grads=True)
    assert found.item() == pytest.approx(loss)
    assert gradient.item() == pytest.approx(slope)


def test_the_kl_estimate_by_hand() -> None:
    log_ratio = torch.tensor([0.5, -0.5])
    assert approximate_kl(log_ratio).item() == pytest.approx((1.648721 - 1.5 + 0.606531 - 0.5) / 2, abs=1e-6)


def by_plain_torch(weights: Tensors, trajectory: Tensors, settings: PPOConfig, steps: int) -> Tensors:
    """The same update in torch's own words, for a single minibatch of terminal transitions, with torch.optim.Adam."""
    parameters = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    adam = torch.optim.Adam(parameters.values(), settings.learning_rate, (settings.beta1, settings.beta2), settings.eps)
    flat = {name: tensor[:, 0] for name, tensor in trajectory.items()}
    returns = flat["rewards"]
    advantage = returns - flat["values"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(steps):
        found = mlp(parameters, flat["observations"])
        chosen: Any = torch.distributions.Categorical(logits=found["logits"])
        ratio = (chosen.log_prob(flat["actions"][:, 0]) - flat["logprobs"]).exp()
        held = ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range)
        policy_loss = -torch.min(ratio * advantage, held * advantage).mean()
        value_loss = (found["value"][:, 0] - returns).square().mean()
        loss = policy_loss + settings.vf_coef * value_loss - settings.ent_coef * chosen.entropy().mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), settings.max_grad_norm)
        adam.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("ent_coef", [0.0, 0.02])
def test_an_update_equals_a_plain_script(ent_coef: float) -> None:
    weights, trajectory = mlp_weights(3, 2), transitions()
    settings = config(epochs=5, minibatch_size=24, ent_coef=ent_coef, learning_rate=0.01)
    found, moments, metrics = ppo_update(mlp, weights, None, [trajectory], settings, 0, TWO)
    expected = by_plain_torch(weights, trajectory, settings, 5)
    assert metrics["optimizer_steps"] == moments["step"] == 5
    for name in weights:
        assert torch.allclose(found[name], expected[name], atol=2e-6), name


def test_the_old_log_probabilities_are_the_stored_ones() -> None:
    """Widely copied code computes them again from the weights being trained, where the ratio is always 1.

    The stored ones here are of another policy, so the first step already differs; a ratio of 1 would ignore them, and
    so would dividing log-probabilities that are scaled alike.
    """
    weights, trajectory = mlp_weights(3, 2), transitions()
    settings = config(epochs=1, minibatch_size=24, max_grad_norm=0, clip_range=1e6, vf_coef=0, beta1=0, beta2=0)
    _, moments, _ = ppo_update(mlp, weights, None, [trajectory], settings, 0, TWO)
    gradient = moments["actor.1.bias.exp_avg"]  # beta1 is 0: the moment is the gradient

    found = mlp(weights, trajectory["observations"][:, 0])["logits"].log_softmax(1)
    chosen = found.gather(1, trajectory["actions"][:, 0].long())[:, 0]
    old, advantage = trajectory["logprobs"][:, 0], (trajectory["rewards"] - trajectory["values"])[:, 0]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    score = torch.nn.functional.one_hot(trajectory["actions"][:, 0, 0].long(), 2) - found.exp()

    def by(ratio: Tensor) -> Tensor:
        return -(ratio * advantage)[:, None].mul(score).mean(0)

    assert torch.allclose(gradient, by((chosen - old).exp()), atol=1e-6)
    for wrong in (torch.ones(24), (chosen / old), (chosen / old).exp()):
        assert not torch.allclose(gradient, by(wrong), atol=1e-2)


def test_the_stored_log_probabilities_are_those_of_the_policy_that_acted() -> None:
    weights = mlp_weights(2, 1, box=True)
    trajectory, _, _ = rollout(mlp, weights, RolloutSpec(EnvSpec(RANDOM_WALK), 3, 8, seed=1), 0, None)
    found = mlp(weights, trajectory["observations"].reshape(24, 2))
    expected: Any = torch.distributions.Normal(found["mean"], found["log_std"].exp())
    actions = trajectory["actions"].reshape(24, 1)
    assert actions.abs().max() > 1  # what the environment got was clipped, what is judged is what was drawn
    assert torch.allclose(trajectory["logprobs"].reshape(24), expected.log_prob(actions)[:, 0], atol=1e-5)
    assert torch.allclose(trajectory["values"].reshape(24), found["value"][:, 0], atol=1e-6)


def update(settings: PPOConfig, seed: int = 3) -> tuple[Tensors, Tensors, dict[str, float]]:
    weights = mlp_weights(2, 1, box=True)
    spec = RolloutSpec(EnvSpec(RANDOM_WALK), 4, 16, seed=1, envs_per_task=2)
    trajectories = [rollout(mlp, weights, spec, group, None)[0] for group in range(2)]
    return ppo_update(mlp, weights, None, trajectories, settings, seed, ONE_BOX)


def test_the_same_update_gives_the_same_bits_and_another_seed_others() -> None:
    settings = config(epochs=3, minibatch_size=16)
    (weights, moments, metrics), (again, moments_again, metrics_again) = update(settings), update(settings)
    assert metrics == metrics_again
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert all(torch.equal(moments[name], moments_again[name]) for name in moments)
    other = update(settings, seed=4)[0]
    assert not torch.equal(weights["log_std"], other["log_std"])


def test_moments_carry_on() -> None:
    """Two updates of one epoch are one of two, where a minibatch is the whole batch and nothing else changes."""
    weights, trajectory = mlp_weights(3, 2), transitions()
    one, two = config(epochs=1, minibatch_size=24), config(epochs=2, minibatch_size=24)
    first, moments, _ = ppo_update(mlp, weights, None, [trajectory], one, 0, TWO)
    second, _, _ = ppo_update(mlp, first, moments, [trajectory], one, 0, TWO)
    both, _, _ = ppo_update(mlp, weights, None, [trajectory], two, 0, TWO)
    assert all(torch.equal(second[name], both[name]) for name in weights)


def test_nothing_given_is_changed() -> None:
    weights, trajectory = mlp_weights(3, 2), transitions()
    _, moments, _ = ppo_update(mlp, weights, None, [trajectory], config(), 0, TWO)
    given = [weights, moments, trajectory]
    before = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in given]
    ppo_update(mlp, weights, moments, [trajectory], config(), 0, TWO)
    for tensors, copies in zip(given, before, strict=True):
        assert all(torch.equal(tensors[name], copies[name]) for name in copies)


def test_buffers_are_no_parameters() -> None:
    weights = mlp_weights(3, 2) | {"scale": torch.ones(3), "steps": torch.zeros((), dtype=torch.int64)}
    found, moments, _ = ppo_update(mlp, weights, None, [transitions()], config(), 0, TWO, buffers={"scale"})
    assert torch.equal(found["scale"], weights["scale"])
    assert not [name for name in moments if name.startswith(("scale", "steps"))]


def test_the_kl_stops_the_update_before_the_step_that_exceeds_it() -> None:
    """The stored log-probs are far from the policy's, so the very first step is refused."""
    weights = mlp_weights(3, 2)
    found, _, metrics = ppo_update(mlp, weights, None, [transitions()], config(target_kl=1e-4), 0, TWO)
    assert metrics["stopped_early"] == 1
    assert metrics["optimizer_steps"] == 0
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert update(config(epochs=2, target_kl=1e3))[2]["stopped_early"] == 0
    late = update(config(epochs=50, target_kl=1e-3, learning_rate=0.01))[2]
    assert late["stopped_early"] == 1
    assert 0 < late["optimizer_steps"] < 50


def test_minibatches_are_nearly_equal_and_hold_each_row_once() -> None:
    batch = Batch.of([transitions(25)], config()).shuffled(0, 0)
    parts = list(batch.minibatches(8))
    assert [len(part) for part in parts] == [7, 6, 6, 6]
    assert sorted(torch.cat([part.returns for part in parts]).tolist()) == sorted(batch.returns.tolist())
    order = [Batch.of([transitions(25)], config()).shuffled(seed, epoch).returns for seed in (0, 1) for epoch in (0, 1)]
    assert not any(torch.equal(a, b) for i, a in enumerate(order) for b in order[:i])


def test_rows_that_are_no_transitions_change_nothing() -> None:
    trajectory, more = transitions(24), transitions(26)
    for name in ("valid", "rewards", "values"):
        more[name] = torch.cat([trajectory[name], torch.full((2, 1), 7, dtype=trajectory[name].dtype)])
    for name in set(trajectory) - {"valid", "rewards", "values"}:
        more[name][:24] = trajectory[name]
    more["valid"][24:] = False
    weights = mlp_weights(3, 2)
    found, expected = (ppo_update(mlp, weights, None, [part], config(), 0, TWO)[0] for part in (more, trajectory))
    assert all(torch.equal(found[name], expected[name]) for name in weights)


def test_weights_that_are_not_finite_are_refused() -> None:
    trajectory = transitions()
    trajectory["rewards"][0] = float("nan")
    with pytest.raises(Invalid, match="not finite"):
        ppo_update(mlp, mlp_weights(3, 2), None, [trajectory], config(), 0, TWO)


def test_without_transitions_there_is_nothing_to_learn() -> None:
    with pytest.raises(Invalid, match="no transitions"):
        ppo_update(mlp, mlp_weights(3, 2), None, [], config(), 0, TWO)


def test_a_policy_of_the_wrong_width_is_told_which() -> None:
    with pytest.raises(Invalid, match=r"logits: \(24, 3\)"):
        ppo_update(mlp, mlp_weights(3, 3), None, [transitions()], config(minibatch_size=24), 0, TWO)


def test_the_normaliser_s_buffers_are_not_trained() -> None:
    weights = mlp_weights(3, 2) | {OBSERVATIONS + "mean": torch.ones(3, dtype=torch.float64)}
    found, moments, _ = ppo_update(mlp, weights, None, [transitions()], config(), 0, TWO)
    assert torch.equal(found[OBSERVATIONS + "mean"], weights[OBSERVATIONS + "mean"])
    assert not [name for name in moments if name.startswith(OBSERVATIONS)]
