"""Each built-in loss written by hand as a custom one: same values, same gradients.

The built-in ones see packed tokens [N], custom ones a padded batch [B, T] with a mask.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradserve.compiler import capture_loss
from gradserve.compute.engine.losses import FUNCTIONS, Batch, settings
from tests.graphs.cases import sent

TOLERANCE = 1e-6
LENGTHS = [5, 1, 8, 3]


def cross_entropy(logprobs: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    return -(weights * logprobs * mask).sum()


def importance_sampling(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -((logprobs - old_logprobs).exp() * advantages * mask).sum()


def ppo(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    return -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask).sum()


def cispo(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).detach().exp()
    return -(ratio.clamp(0.0, 4.0) * logprobs * advantages * mask).sum()


def dro(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor, beta: float = 0.05) -> Tensor:
    return -((logprobs * advantages - 0.5 * beta * (logprobs - old_logprobs) ** 2) * mask).sum()


def gspo(
    logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence_ratio_mask: Tensor
) -> Tensor:
    inside = (sequence_ratio_mask != 0).float() * mask
    gap = (logprobs.detach() - old_logprobs) * inside
    s = (gap.sum(1) / inside.sum(1).clamp(min=1)).exp()[:, None]
    ratio = s * (logprobs - logprobs.detach()).exp()
    return -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask).sum()


def stable_reinforce(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    gap = logprobs - old_logprobs
    ratio = gap.detach().exp().clamp(max=4.0)
    return ((-ratio * logprobs * advantages + 0.005 * gap.square()) * mask).sum()


BY_HAND: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}


def test_every_built_in_loss_is_here() -> None:
    assert set(BY_HAND) == set(FUNCTIONS)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_custom_loss_equals_the_built_in_one(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    rows = {
        key: [torch.randn(length, generator=generator) for length in LENGTHS]
        for key in ("logprobs", "old_logprobs", "advantages", "weights")
    }
    rows["mask"] = [torch.ones(length) for length in LENGTHS]
    rows["sequence_ratio_mask"] = [(torch.rand(length, generator=generator) > 0.4).float() for length in LENGTHS]

    packed = torch.cat(rows["logprobs"]).requires_grad_()
    inputs = {key: torch.cat(rows[key]) for key in ("advantages", "weights", "sequence_ratio_mask")}
    inputs["logprobs"] = torch.cat(rows["old_logprobs"])
    expected = FUNCTIONS[name](Batch(packed, inputs, settings(name, {}), LENGTHS)).sum()
    torch.autograd.backward(expected)

    graph = capture_loss(BY_HAND[name])
    padded = {key: pad_sequence(rows[key], batch_first=True) for key in graph.names("input")}
    padded["logprobs"].requires_grad_()
    found = sent(graph).run(padded)["loss"]
    torch.autograd.backward(found)

    assert found.item() == pytest.approx(expected.item(), abs=TOLERANCE, rel=TOLERANCE)
    gradient = padded["logprobs"].grad
    assert gradient is not None
    unpadded = torch.cat([gradient[i, :length] for i, length in enumerate(LENGTHS)])
    torch.testing.assert_close(unpadded, packed.grad, atol=TOLERANCE, rtol=TOLERANCE)
    assert all(gradient[i, length:].eq(0).all() for i, length in enumerate(LENGTHS))
