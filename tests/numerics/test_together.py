"""Tasks of several runs in one pass: each gets what it would get alone, and what is wrong with one stays with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradserve.compute.engine import engine as engine_module
from gradserve.compute.engine import train
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.engine import divide
from gradserve.compute.engine.memory_plan import Plan
from gradserve.compute.tasks import Done, Failed, GradTask, Outcome
from gradserve.wire.data import Row
from tests.numerics.lab import Lab, ids, plain_rows, row, rows_of

LONG = (16, 37, 64)


def floats(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0, 1, count).astype(np.float32)


def rewarded(seed: int, lengths: tuple[int, ...], **others: float) -> list[Row]:
    """Rows for the ratio losses; sampler log-probs near those of a random model over 320 ids."""
    return [
        row(
            ids(seed + index, length),
            logprobs=floats(seed, length) * 0.1 - 5.8,
            advantages=floats(seed + 1, length),
            **{name: np.full(length, value, np.float32) for name, value in others.items()},
        )
        for index, length in enumerate(lengths)
    ]


def tasks(lab: Lab, base: str, lengths: tuple[int, ...] = LONG) -> list[GradTask]:
    """Every loss; ranks 1 to 33; adapters on attention, on the MLP, on the head, on all; one adapter twice."""
    all_modules = lab.adapter(base, seed=1, rank=8)
    attention = lab.adapter(base, seed=2, rank=1, train_mlp=False, train_unembed=False)
    mlp = lab.adapter(base, seed=3, rank=33, train_attn=False, train_unembed=False)
    head = lab.adapter(base, seed=4, rank=4, train_attn=False, train_mlp=False)
    soft = [
        row(
            ids(9, 20),
            target_tokens=np.random.default_rng(0).integers(0, 320, (20, 3)),
            weights=np.abs(floats(2, 60)).reshape(20, 3),
        )
    ]
    requests = [
        (all_modules, plain_rows(1, lengths), "cross_entropy", {}),
        (attention, rewarded(2, lengths), "importance_sampling", {}),
        (mlp, rewarded(3, lengths), "ppo", {"clip_low_threshold": 0.9}),
        (all_modules, rewarded(4, lengths), "cispo", {}),
        (head, rewarded(5, lengths), "dro", {"beta": 0.1}),
        (mlp, rewarded(6, lengths, sequence_ratio_mask=1.0), "gspo", {}),
        (attention, rewarded(7, lengths), "stable_reinforce", {}),
        (head, soft, "cross_entropy", {}),
    ]
    return [
        GradTask(f"g{number}", base, weights, rows, loss, config, backward=True)
        for number, (weights, rows, loss, config) in enumerate(requests)
    ]


def done(outcome: Outcome) -> Done:
    assert isinstance(outcome, Done), outcome
    return outcome


@pytest.mark.parametrize("lengths", [LONG, (1, 2)])
@pytest.mark.parametrize("base", ["llama", "qwen3", "mistral-window"])
def test_together_is_each_alone_to_the_bit(lab: Lab, base: str, lengths: tuple[int, ...]) -> None:
    together = tasks(lab, base, lengths)
    alone = [lab.run(task) for task in together]
    for got, want in zip(map(done, lab.engine.run_together(together)), alone, strict=True):
        assert got.task_id == want.task_id
        assert got.objects == want.objects, f"{got.task_id}: another gradient"
        assert rows_of(got) == rows_of(want)
        assert (got.usage.train_tokens, got.usage.prefill_tokens) == (want.usage.train_tokens, 0)


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("base", ["llama", "qwen3", "mistral-window"])
def test_requests_of_one_shape_are_each_alone_to_the_bit(lab: Lab, base: str, rank: int) -> None:
    """Products of small ranks must not be batched: their bits would be others."""
    weights = [lab.adapter(base, seed=seed, rank=rank) for seed in range(4)]
    together = [
        GradTask(f"g{seed}", base, digest, rewarded(seed, (16, 16)), "ppo", {}, backward=True)
        for seed, digest in enumerate(weights)
    ]
    alone = [lab.run(task) for task in together]
    for got, want in zip(map(done, lab.engine.run_together(together)), alone, strict=True):
        assert got.objects == want.objects, f"{got.task_id}: another gradient"
        assert rows_of(got) == rows_of(want)


def test_forward_alone(lab: Lab) -> None:
    together = [
        GradTask(task.id, task.base, task.weights, task.rows, task.loss, task.config, backward=False)
        for task in tasks(lab, "llama")
    ]
    for task, got in zip(together, map(done, lab.engine.run_together(together)), strict=True):
        assert got.objects == {}
        assert rows_of(got) == rows_of(lab.run(task))
        assert (got.usage.train_tokens, got.usage.prefill_tokens) == (0, task.tokens)


def test_what_is_wrong_with_one_stays_with_it(lab: Lab) -> None:
    """Refused input, missing weights, a loss and a gradient that are not finite, weights that are NaN."""
    good = tasks(lab, "llama")[:3]
    weights = good[0].weights
    nan = lab.arrays.put({name: tensor * torch.nan for name, tensor in lab.arrays.get(weights).items()})
    infinite = [row(ids(0, 20), weights=np.full(20, np.inf, np.float32))]
    # The loss is summed in float64 and finite; in the backward pass the terms overflow.
    large = [row(ids(0, 20), weights=np.full(20, 2e37, np.float32))]
    bad = [
        GradTask("no-rows", "llama", weights, [], "cross_entropy", {}, backward=True),
        GradTask("missing", "llama", "0" * 64, plain_rows(), "cross_entropy", {}, backward=True),
        GradTask("infinite", "llama", weights, infinite, "cross_entropy", {}, backward=True),
        GradTask("nan", "llama", nan, plain_rows(), "cross_entropy", {}, backward=True),
        GradTask("large", "llama", weights, large, "cross_entropy", {}, backward=True),
    ]
    mixed = [bad[0], good[0], bad[1], bad[2], good[1], bad[3], good[2], bad[4]]
    outcomes = {outcome.task_id: outcome for outcome in lab.engine.run_together(mixed)}
    assert list(outcomes) == [task.id for task in mixed]
    for task in good:
        assert done(outcomes[task.id]).objects == lab.run(task).objects
    kinds = {task.id: outcomes[task.id] for task in bad}
    assert all(isinstance(outcome, Failed) for outcome in kinds.values()), kinds
    for task in bad:
        alone = lab.fail(task)
        together = kinds[task.id]
        assert isinstance(together, Failed)
        assert (together.kind, together.message) == (alone.kind, alone.message)
    assert "the gradient is not finite" in {k: o.message for k, o in kinds.items() if isinstance(o, Failed)}["large"]


def test_a_pass_that_fails_is_run_task_by_task(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    together = tasks(lab, "llama")
    alone = [lab.run(task) for task in together]
    passes: list[int] = []

    def cramped(base: Base, jobs: list[train.Job], backward: bool, plan: Plan) -> object:
        passes.append(len(jobs))
        if len(jobs) > 1:
            torch.empty(1 << 60, dtype=torch.uint8)
        return train.forward_backward(base, jobs, backward, plan)

    monkeypatch.setattr(engine_module, "forward_backward", cramped)
    outcomes = lab.engine.run_together(together)
    assert [done(outcome).objects for outcome in outcomes] == [outcome.objects for outcome in alone]
    assert passes == [8, *[1] * 8]


def test_the_time_of_a_pass_is_divided_by_tokens() -> None:
    assert divide(1000, [1, 2, 1]) == [250, 500, 250]
    parts = divide(1001, [7, 11, 13, 0])
    assert sum(parts) == 1001
    assert parts[3] == 0
