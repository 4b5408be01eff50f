"""Distributions against torch.distributions, and samples against the probabilities they were drawn with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from gradserve.compute.engine.control.distributions import ActionDistribution
from gradserve.compute.engine.control.noise import action_noise
from gradserve.compute.engine.control.spaces import spec_of
from gradserve.wire.errors import Invalid

ROWS = 5
SPACES: dict[str, gymnasium.Space[Any]] = {
    "discrete": spaces.Discrete(4, start=-1),
    "multi discrete": spaces.MultiDiscrete([2, 3, 4]),
    "multi binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,)),
    "matrix": spaces.Box(-1, 1, (2, 2)),
    "dict": spaces.Dict({"turn": spaces.Box(-1, 1, (2,)), "gear": spaces.Discrete(3), "lights": spaces.MultiBinary(2)}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (1,)), spaces.MultiDiscrete([2, 2]), spaces.Box(0, 1))),
}
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=list(SPACES))
both_deviations = pytest.mark.parametrize("per_row", [False, True], ids=["one deviation", "one per row"])


def outputs_for(space: gymnasium.Space[Any], per_row: bool) -> dict[str, Tensor]:
    spec, draw = spec_of(space), torch.Generator().manual_seed(0)
    found = {}
    if spec.num_logits:
        found["logits"] = torch.randn(ROWS, spec.num_logits, generator=draw) * 2
    if spec.num_means:
        found["mean"] = torch.randn(ROWS, spec.num_means, generator=draw)
        found["log_std"] = torch.randn((ROWS, spec.num_means) if per_row else (spec.num_means,), generator=draw)
    return found


def by_torch(space: gymnasium.Space[Any], outputs: Mapping[str, Tensor]) -> list[torch.distributions.Distribution]:
    """One distribution per element of the action, from the outputs side by side."""
    found: list[torch.distributions.Distribution] = []
    logits, means = 0, 0

    def categorical(size: int) -> None:
        nonlocal logits
        found.append(Categorical(logits=outputs["logits"][:, logits : logits + size]))
        logits += size

    def visit(part: gymnasium.Space[Any]) -> None:
        nonlocal logits, means
        match part:
            case spaces.Dict() | spaces.Tuple():
                for inner in part.spaces.values() if isinstance(part, spaces.Dict) else part.spaces:
                    visit(inner)
            case spaces.Discrete():
                categorical(int(part.n))
            case spaces.MultiDiscrete():
                for size in part.nvec.tolist():
                    categorical(size)
            case spaces.MultiBinary():
                for _ in range(int(np.prod(part.shape))):
                    found.append(Bernoulli(logits=outputs["logits"][:, logits]))
                    logits += 1
            case _:
                for _ in range(spec_of(part).size):
                    deviation = outputs["log_std"][..., means].exp().expand(ROWS)
                    found.append(Normal(outputs["mean"][:, means], deviation))
                    means += 1

    visit(space)
    return found


def drawn(space: gymnasium.Space[Any], outputs: Mapping[str, Tensor], seed: int = 0) -> NDArray[Any]:
    distribution = ActionDistribution(spec_of(space))
    noise = action_noise(seed, range(ROWS), 0, 1, distribution.draws)[0]
    return distribution.sample({name: tensor.numpy() for name, tensor in outputs.items()}, noise)


@every_space
@both_deviations
def test_log_probabilities_and_entropy_equal_torch_s(space: gymnasium.Space[Any], per_row: bool) -> None:
    outputs = outputs_for(space, per_row)
    actions = torch.from_numpy(drawn(space, outputs))
    parts = by_torch(space, outputs)
    assert actions.shape == (ROWS, len(parts)) == (ROWS, spec_of(space).size)
    distribution = ActionDistribution(spec_of(space))
    expected = torch.stack([part.log_prob(actions[:, i]) for i, part in enumerate(parts)]).sum(0)
    assert torch.allclose(distribution.log_prob(outputs, actions), expected, atol=1e-5)
    entropy = torch.stack([part.entropy() for part in parts]).sum(0)
    assert torch.allclose(distribution.entropy(outputs).expand(ROWS), entropy, atol=1e-5)


@every_space
def test_gradients_equal_torch_s(space: gymnasium.Space[Any]) -> None:
    outputs = {name: tensor.requires_grad_() for name, tensor in outputs_for(space, per_row=False).items()}
    leaves = list(outputs.values())
    actions = torch.from_numpy(drawn(space, {name: tensor.detach() for name, tensor in outputs.items()}))
    distribution = ActionDistribution(spec_of(space))
    ours = distribution.log_prob(outputs, actions).mean() + 0.1 * distribution.entropy(outputs).mean()
    parts = by_torch(space, outputs)
    theirs = torch.stack([part.log_prob(actions[:, i]) + 0.1 * part.entropy() for i, part in enumerate(parts)])
    found, expected = torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs.sum(0).mean(), leaves)
    for name, a, b in zip(outputs, found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


@every_space
def test_the_mode_is_the_likeliest(space: gymnasium.Space[Any]) -> None:
    outputs = outputs_for(space, per_row=False)
    distribution = ActionDistribution(spec_of(space))
    mode = torch.from_numpy(distribution.mode({name: tensor.numpy() for name, tensor in outputs.items()}))
    best = distribution.log_prob(outputs, mode)
    for seed in range(40):
        other = distribution.log_prob(outputs, torch.from_numpy(drawn(space, outputs, seed)))
        assert (other <= best + 1e-6).all()


def test_samples_have_their_probabilities() -> None:
    """20,000 draws of each kind; five standard errors."""
    n = 20_000
    noise = action_noise(0, range(n), 0, 1, 2)[0]

    def sample(space: gymnasium.Space[Any], **outputs: list[float]) -> NDArray[Any]:
        distribution = ActionDistribution(spec_of(space))
        rows = {name: np.tile(np.array(row, np.float32), (n, 1)) for name, row in outputs.items()}
        return distribution.sample(rows, noise[:, : distribution.draws])[:, 0]

    chosen = sample(spaces.Discrete(3), logits=np.log([0.2, 0.3, 0.5]).tolist())
    for value, probability in enumerate((0.2, 0.3, 0.5)):
        assert abs((chosen == value).mean() - probability) < 5 * (0.25 / n) ** 0.5
    heads = sample(spaces.MultiBinary(1), logits=[float(np.log(0.7 / 0.3))])
    assert abs(heads.mean() - 0.7) < 5 * (0.21 / n) ** 0.5
    normal = sample(spaces.Box(-1, 1, (1,)), mean=[2.0], log_std=[float(np.log(3))])
    assert abs(normal.mean() - 2) < 5 * 3 / n**0.5
    assert abs(normal.std() - 3) < 5 * 3 / (2 * n) ** 0.5
    assert abs((np.abs(normal - 2) < 3).mean() - 0.6827) < 5 * (0.2166 / n) ** 0.5


def test_a_masked_action_is_never_drawn_and_its_entropy_is_finite() -> None:
    distribution = ActionDistribution(spec_of(spaces.Discrete(4)))
    outputs = {"logits": torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]]).expand(1000, 4)}
    actions = distribution.sample({"logits": outputs["logits"].numpy()}, action_noise(0, range(1000), 0, 1, 1)[0])
    assert set(np.unique(actions)) == {1.0, 3.0}
    assert torch.allclose(distribution.entropy(outputs), torch.tensor(2.0).log())


def test_noise_of_an_environment_depends_on_no_other() -> None:
    together = action_noise(7, range(6), 10, 5, 3)
    alone = [action_noise(7, range(i, i + 1), 10 + t, 1, 3)[0, 0] for t in range(5) for i in range(6)]
    assert np.array_equal(together.reshape(30, 3), np.stack(alone))
    assert len(np.unique(together)) == together.size


def test_what_a_policy_must_give_is_said() -> None:
    distribution = ActionDistribution(spec_of(SPACES["box"]))
    with pytest.raises(Invalid, match=r"log_std: no such output; .* gives \[5, 2\]"):
        distribution.outputs({"mean": torch.zeros(5, 2)}, 5)
    with pytest.raises(Invalid, match=r"mean: \(5, 3\)"):
        distribution.outputs({"mean": torch.zeros(5, 3), "log_std": torch.zeros(2)}, 5)
