"""Entropy, best log-probs and hidden states beside the targets' log-probs, against plain autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradserve.compute.engine.kernels import FAST
from gradserve.compute.engine.lora import Adapter, Route
from gradserve.compute.engine.packing import pack
from gradserve.compute.engine.scores import Wanted, _MoreOfIt, scores
from tests.numerics.lab import Lab, plain_rows

V, K, BEST = 37, 2, 3


def expected(logits: Tensor, targets: Tensor) -> list[Tensor]:
    lp = logits.log_softmax(-1)
    return [lp.gather(1, targets), -(lp.exp() * lp).sum(1), lp.topk(BEST, dim=1).values]


@pytest.mark.parametrize(("entropy", "topk"), [(True, 0), (False, BEST), (True, BEST)])
def test_the_head_gives_plain_values_and_gradients(entropy: bool, topk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, V, generator=generator, requires_grad=True)
    targets = torch.randint(0, V, (5, K), generator=generator)
    wanted = [each for each, asked in zip(expected(logits, targets), (True, entropy, topk > 0), strict=True) if asked]
    found = _MoreOfIt.apply(logits.clone(), targets, entropy, topk, FAST)  # type: ignore[no-untyped-call]
    cotangents = [torch.randn(each.shape, generator=generator) for each in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    (ours,) = torch.autograd.grad(found, logits, cotangents)
    (theirs,) = torch.autograd.grad(wanted, logits, cotangents)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_token_without_probability_adds_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    _, entropy = _MoreOfIt.apply(logits.clone(), torch.zeros(1, 1, dtype=torch.int64), True, 0, FAST)  # type: ignore[no-untyped-call]
    assert entropy.item() == pytest.approx(np.log(2))
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert torch.isfinite(gradient).all()


def test_a_head_in_pieces_gives_the_same(lab: Lab) -> None:
    """And hidden states are what the head reads."""
    base = lab.base("qwen3")
    packed = pack(plain_rows(0, (9, 14)), base.device)
    tensors = lab.arrays.get(lab.adapter("qwen3"))
    tensors = tensors | {"value_head.weight": torch.ones(1, base.config.hidden_size), "value_head.bias": torch.ones(1)}
    wanted = Wanted(entropy=True, topk=BEST, hidden=True, values=True)
    found = []
    for pieces in (None, 8):
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        routing = [Route(Adapter.of(leaves), slice(0, packed.count))]
        with base.routed(routing):
            got = scores(base, routing, packed, pieces, wanted, [(leaves, packed.count)]).named()
            total = sum((each * torch.arange(each.numel()).view(each.shape) * 1e-3).sum() for each in got.values())
            assert isinstance(total, Tensor)
            gradient = torch.autograd.grad(total, list(leaves.values()))
        with torch.no_grad(), base.routed(routing):
            again = base.logits(got["hidden"]).log_softmax(-1)
        torch.testing.assert_close(again.gather(1, packed.targets), got["logprobs"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got["values"], got["hidden"].sum(1) + 1)
        found.append([*got.values(), *gradient])
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(whole, cut, atol=1e-5, rtol=1e-4)
