"""Lowering is pure and printable: golden text, so that a change of plan shows in review."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from gradserve.compute.tasks import GradTask
from gradserve.orchestration.lower import cut, lower
from gradserve.orchestration.program import Compute
from gradserve.store.base import Run
from gradserve.wire.data import Array, Row, as_tokens
from gradserve.wire.ops import (
    AdamParams,
    CreateModel,
    ForwardBackward,
    LoadWeights,
    LoraConfig,
    OpBody,
    OptimStep,
    Sample,
    SamplingParams,
    SaveWeights,
)

LORA = LoraConfig(8, seed=3)
W, M, G1, G2 = "a" * 64, "b" * 64, "c" * 64, "d" * 64
RUN = Run("r", "t", "s", "tiny", LORA, 0.0, 0.0, version=4, weights=W, moments=M, gradients=((7, G2), (5, G1)))

FULL = msgspec.structs.replace(RUN, lora=None)


def row(length: int) -> Row:
    return Row(as_tokens(range(length)), {"target_tokens": Array.of(np.arange(length))})


GOLDEN: list[tuple[OpBody, Run | None, str]] = [
    (CreateModel("tiny", LORA), RUN, "  %0 = init tiny rank=8 seed=3"),
    (
        ForwardBackward([row(6), row(4), row(3), row(20), row(1)], "ppo", {}),
        RUN,
        "  %0 = grad tiny+aaaaaaaa ppo rows=2 tokens=10\n"
        "  %1 = grad tiny+aaaaaaaa ppo rows=1 tokens=3\n"
        "  %2 = grad tiny+aaaaaaaa ppo rows=1 tokens=20\n"
        "  %3 = grad tiny+aaaaaaaa ppo rows=1 tokens=1\n"
        "  %4 = reduce %0 %1 %2 %3",
    ),
    (
        ForwardBackward([row(6), row(6)], "cross_entropy", {}, backward=False),
        RUN,
        "  %0 = forward tiny+aaaaaaaa cross_entropy rows=1 tokens=6\n"
        "  %1 = forward tiny+aaaaaaaa cross_entropy rows=1 tokens=6",
    ),
    (CreateModel("tiny", None), FULL, "  %0 = init tiny all parameters"),
    (
        ForwardBackward([row(6), row(4), row(3), row(20), row(1)], "ppo", {}),
        FULL,
        "  %0 = grad tiny+aaaaaaaa ppo rows=5 tokens=34 passes=4",
    ),
    (
        ForwardBackward([row(6), row(6)], "cross_entropy", {}, backward=False),
        FULL,
        "  %0 = forward tiny+aaaaaaaa cross_entropy rows=2 tokens=12 passes=2",
    ),
    (
        OptimStep(AdamParams()),
        RUN,
        "  %0 = adamw weights=aaaaaaaa moments=bbbbbbbb gradients=cccccccc dddddddd",
    ),
    (SaveWeights("n", "weights"), RUN, "  %0 = persist aaaaaaaa bbbbbbbb"),
    (SaveWeights("n", "sampler_weights"), RUN, "  %0 = persist aaaaaaaa"),
    (
        Sample("tiny", W, as_tokens([1, 2]), 3, SamplingParams(max_tokens=4, seed=1)),
        None,
        "  %0 = sample tiny+aaaaaaaa prompt=2 n=3",
    ),
]


@pytest.mark.parametrize(("body", "run", "text"), GOLDEN)
def test_golden_programs(body: OpBody, run: Run | None, text: str) -> None:
    assert str(lower("r:op:9", body, run, task_tokens=10)) == f"program r:op:9\n{text}"


def test_an_optim_step_without_gradients_computes_nothing() -> None:
    empty = msgspec.structs.replace(RUN, gradients=())
    assert lower("o", OptimStep(AdamParams()), empty, 10).steps == ()
    assert lower("o", LoadWeights("tinker://r/weights/n", optimizer=True), empty, 10).steps == ()


def test_the_passes_of_a_full_run_are_the_groups_that_adapters_get_as_tasks() -> None:
    rows = [row(length) for length in (5, 5, 1, 30, 9, 2)]
    (step,) = lower("o", ForwardBackward(rows, "ppo", {}), FULL, 10).steps
    assert isinstance(step, Compute)
    assert isinstance(step.task, GradTask)
    assert step.task.passes() == cut(rows, 10)
    assert GradTask("o", "tiny", W, rows, "ppo", {}, True).passes() == [rows]


def test_cutting_keeps_every_row_once_and_in_order() -> None:
    rows = [row(length) for length in (5, 5, 1, 30, 9, 2)]
    groups = cut(rows, 10)
    assert [r for group in groups for r in group] == rows
    assert [sum(r.length for r in group) for group in groups] == [10, 1, 30, 9, 2]
