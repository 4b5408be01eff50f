"""Optimizer steps equal torch.optim.AdamW on a PEFT model, step by step, with decay, clipping and a schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradserve.compute.tasks import OptimTask, ReduceTask
from gradserve.wire.ops import AdamParams
from tests.numerics import reference
from tests.numerics.lab import Lab, plain_rows, rows_of

RANK = 4
STEPS = 10
WEIGHT_ATOL = 1e-5
"""After ten steps of 1e-3; Adam divides by the gradient's own size, so noise in tiny gradients is magnified."""


@pytest.mark.parametrize("adam", [
    AdamParams(learning_rate=1e-3, eps=1e-8),
    AdamParams(learning_rate=1e-3, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5, beta1=0.8, beta2=0.99),
])  # fmt: skip
def test_ten_steps(lab: Lab, tmp_path: Path, adam: AdamParams) -> None:
    weights, moments = lab.adapter("llama", rank=RANK), None
    model = reference.load_peft(lab.models["llama"], lab.store.path(weights), tmp_path / "peft", RANK)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay,
    )  # fmt: skip
    for step in range(STEPS):
        rows = plain_rows(seed=step)
        optimizer.zero_grad()
        loss = reference.loss("cross_entropy", rows, reference.logprobs(model, rows), {})
        torch.autograd.backward(loss)
        limit = adam.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], limit)
        optimizer.step()

        half = [lab.grad("llama", weights, part) for part in (rows[:2], rows[2:])]
        assert sum(rows_of(done).metrics["loss:sum"] for done in half) == pytest.approx(loss.item(), rel=1e-5)
        gradients = [done.objects["gradient"] for done in half]
        done = lab.run(OptimTask("step", weights, moments, gradients, adam))
        assert done.metrics == {"grad_norm": pytest.approx(norm.item(), rel=1e-4), "learning_rate": adam.learning_rate}
        weights, moments = done.objects["weights"], done.objects["moments"]
    expected = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}
    got = lab.arrays.get(weights)
    assert got.keys() == expected.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(got[name], parameter.detach(), atol=WEIGHT_ATOL, rtol=0)


def test_a_step_changes_nothing_that_it_was_given(lab: Lab) -> None:
    weights = lab.adapter("llama")
    gradient = lab.grad("llama", weights, plain_rows()).objects["gradient"]
    before = {digest: {k: v.clone() for k, v in lab.arrays.get(digest).items()} for digest in (weights, gradient)}
    first = lab.run(OptimTask("step", weights, None, [gradient], AdamParams(grad_clip_norm=0.1)))
    moments = {k: v.clone() for k, v in lab.arrays.get(first.objects["moments"]).items()}
    next_gradient = lab.grad("llama", first.objects["weights"], plain_rows()).objects["gradient"]
    lab.run(OptimTask("step", first.objects["weights"], first.objects["moments"], [next_gradient], AdamParams()))
    for digest, tensors in before.items():
        assert all(torch.equal(lab.arrays.get(digest)[name], tensor) for name, tensor in tensors.items())
    assert all(torch.equal(lab.arrays.get(first.objects["moments"])[k], v) for k, v in moments.items())


def test_the_same_task_gives_the_same_digests(lab: Lab) -> None:
    weights = lab.adapter("llama")
    gradient = lab.grad("llama", weights, plain_rows()).objects["gradient"]
    task = OptimTask("step", weights, None, [gradient, gradient], AdamParams())
    assert lab.run(task).objects == lab.run(task).objects
    assert lab.grad("llama", weights, plain_rows()).objects["gradient"] == gradient


def test_many_gradients_or_their_reduction_are_one_step(lab: Lab) -> None:
    weights = lab.adapter("llama")
    gradients = [lab.grad("llama", weights, plain_rows(seed)).objects["gradient"] for seed in range(3)]
    reduced = lab.run(ReduceTask("reduce", gradients)).objects["gradient"]
    direct = lab.run(OptimTask("step", weights, None, gradients, AdamParams()))
    assert lab.run(OptimTask("step", weights, None, [reduced], AdamParams())).objects == direct.objects


def test_a_step_without_gradients_only_decays(lab: Lab) -> None:
    weights = lab.adapter("llama")
    done = lab.run(OptimTask("step", weights, None, [], AdamParams(learning_rate=0.1, weight_decay=0.5)))
    assert done.metrics["grad_norm"] == 0.0
    for name, tensor in lab.arrays.get(done.objects["weights"]).items():
        torch.testing.assert_close(tensor, lab.arrays.get(weights)[name] * 0.95)
