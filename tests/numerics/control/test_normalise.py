"""Running moments against numpy's over the whole stream, and VecNormalize's formulas written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gradserve.compute.engine.control.evaluate import evaluate
from gradserve.compute.engine.control.normalise import OBSERVATIONS, Moments, ObservationNormaliser
from gradserve.compute.engine.control.ppo import ppo_update
from gradserve.compute.engine.control.rollout import Tensors, rollout
from gradserve.wire.control import EnvSpec, PPOConfig, RolloutSpec, SpaceSpec
from tests.numerics.control.toys import RANDOM_WALK, mlp, mlp_weights

BOX = SpaceSpec("box", (1,), low=(-1.0,), high=(1.0,))
ENV = EnvSpec(RANDOM_WALK)


def test_moments_of_parts_are_those_of_the_whole() -> None:
    rows = np.random.default_rng(0).normal(5, 3, size=(1000, 4))
    total = Moments.none((4,))
    for part in np.split(rows, [1, 17, 500]):
        total = total.merged(Moments.of(part))
    assert total.count == 1000
    np.testing.assert_allclose(total.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(total.var, rows.var(0), rtol=1e-12)
    read = Moments.read(total.tensors("x."), "x.", (4,))
    assert np.array_equal(read.mean, total.mean)
    assert np.array_equal(read.var, total.var)
    assert read.count == total.count


def test_nothing_adds_nothing() -> None:
    some, none = Moments.of(np.array([[1.0], [3.0]])), Moments.of(np.zeros((0, 1)))
    assert some.merged(none) == some == none.merged(some)
    assert none.merged(none).var.tolist() == [1.0]


def test_observations_are_normalised_and_clipped() -> None:
    normaliser = ObservationNormaliser(Moments(np.array([1.0, 0.0]), np.array([4.0, 1e-12]), 10), clip=2.0)
    seen = normaliser(np.array([[3.0, 1.0], [-1.0, 0.0]], np.float32))
    np.testing.assert_allclose(seen, [[1.0, 2.0], [-1.0, 0.0]], atol=1e-6)


def train(updates: int) -> tuple[Tensors, list[Tensors], list[Tensors]]:
    """Weights, and the trajectories with and without normalisation of the same rollouts, of two groups."""
    spec = RolloutSpec(ENV, 4, 10, seed=5, envs_per_task=2, normalise_observations=True, clip_observation=1e6)
    weights, moments = mlp_weights(2, 1, box=True), None
    state: Tensors = {}
    seen, raw = [], []
    for number in range(updates):
        trajectories = []
        for group in range(spec.groups):
            before = Moments.read(weights, OBSERVATIONS, (2,))
            trajectory, new, _ = rollout(mlp, weights, spec, group, state)
            state |= new
            trajectories.append(trajectory)
            undone = trajectory["observations"].double().numpy() * np.sqrt(before.var + 1e-8) + before.mean
            seen.append(trajectory)
            raw.append({"observations": torch.from_numpy(undone)})
        weights, moments, _ = ppo_update(mlp, weights, moments, trajectories, PPOConfig(epochs=1), number, BOX)
    return weights, seen, raw


def test_the_weights_carry_the_moments_of_all_that_was_seen() -> None:
    """Frozen during a rollout, so what was seen can be undone with the moments from before, and numpy asked."""
    weights, _, raw = train(3)
    everything = np.concatenate([part["observations"].numpy().reshape(-1, 2) for part in raw])
    found = Moments.read(weights, OBSERVATIONS, (2,))
    assert found.count == len(everything) == 3 * 40
    np.testing.assert_allclose(found.mean, everything.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.var, everything.var(0), rtol=1e-5)


def test_the_first_rollout_sees_what_there_is() -> None:
    _, seen, raw = train(1)
    assert torch.allclose(seen[0]["observations"].double(), raw[0]["observations"], atol=1e-6)


def test_evaluation_applies_the_moments_and_leaves_them() -> None:
    weights, _, _ = train(2)
    before = {name: tensor.clone() for name, tensor in weights.items()}

    def watched(weights: Mapping[str, torch.Tensor], observations: torch.Tensor) -> Tensors:
        batches.append(observations.numpy().copy())
        return mlp(weights, observations)

    batches: list[np.ndarray[Any, Any]] = []
    evaluate(watched, weights, ENV, 3, seed=0, normalise_observations=True)
    normalised = batches[0]
    batches.clear()
    evaluate(watched, weights, ENV, 3, seed=0)
    moments = Moments.read(weights, OBSERVATIONS, (2,))
    np.testing.assert_allclose(normalised, (batches[0] - moments.mean) / np.sqrt(moments.var + 1e-8), rtol=1e-4)
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_rewards_as_vecnormalize() -> None:
    """Its formulas in numpy, over a stream that is cut into rollouts at another place than its episodes."""
    gamma, clip = 0.9, 1.2
    plain = RolloutSpec(ENV, 3, 7, seed=2, gamma=gamma)
    spec = RolloutSpec(ENV, 3, 7, seed=2, gamma=gamma, normalise_rewards=True, clip_reward=clip)
    weights = mlp_weights(2, 1, box=True)
    states: list[Tensors] = [{}, {}]
    mean, var, count, discounted = 0.0, 1.0, 1e-4, np.zeros(3)
    clipped = 0
    for _ in range(4):
        raw, states[0], _ = rollout(mlp, weights, plain, 0, states[0])
        found, states[1], _ = rollout(mlp, weights, spec, 0, states[1])
        for t in range(7):
            rewards = raw["rewards"][t].double().numpy()
            discounted = discounted * gamma + rewards
            delta, total = discounted.mean() - mean, count + 3
            var = (var * count + discounted.var() * 3 + delta**2 * count * 3 / total) / total
            mean, count = mean + delta * 3 / total, total
            expected = np.clip(rewards / np.sqrt(var + 1e-8), -clip, clip)
            clipped += (np.abs(expected) == clip).sum()
            np.testing.assert_allclose(found["rewards"][t].numpy(), expected, rtol=1e-5)
            discounted[(raw["terminated"] | raw["truncated"])[t].numpy()] = 0
    assert clipped > 0
