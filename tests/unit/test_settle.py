"""Combining the parts of one forward_backward follows the SDK's own rules for chunks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from gradserve.compute.tasks import Failed
from gradserve.orchestration.settle import combine, problem_of
from gradserve.wire.data import Array
from gradserve.wire.errors import ServerError
from gradserve.wire.results import ForwardBackwardResult


def part(rows: int, **metrics: float) -> ForwardBackwardResult:
    logprobs = [Array.of(np.full(2, -1.0 * rows, np.float32)) for _ in range(rows)]
    return ForwardBackwardResult(logprobs, {key.replace("__", ":"): value for key, value in metrics.items()})


def test_metrics_by_suffix() -> None:
    whole = combine([part(1, loss__sum=2.0, r__mean=1.0, r__max=3.0, r__min=-1.0),
                     part(3, loss__sum=5.0, r__mean=2.0, r__max=2.0, r__min=-4.0)])  # fmt: skip
    assert whole.metrics == {"loss:sum": 7.0, "r:mean": 1.75, "r:max": 3.0, "r:min": -4.0}
    assert [row.numpy()[0] for row in whole.logprobs] == [-1.0, -3.0, -3.0, -3.0]


def test_parts_computed_with_different_weights_are_not_combined() -> None:
    parts = [msgspec.structs.replace(part(1, loss__sum=1.0), weights=weights) for weights in ("a" * 64, "b" * 64)]
    assert combine(parts[:1]).weights == "a" * 64
    with pytest.raises(ServerError, match="different versions") as caught:
        combine(parts)
    assert caught.value.code == "weights.mismatch"


def test_a_metric_without_a_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rule to combine"):
        combine([part(1, loss__odd=1.0), part(1, loss__odd=1.0)])


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("user", 400, "compute.refused"),
        ("out_of_memory", 500, "compute.out_of_memory"),
        ("corrupt", 500, "weights.corrupt"),
        ("mismatch", 500, "weights.mismatch"),
        ("internal", 500, "compute.fault"),
    ],
)
def test_what_the_client_is_told(kind: str, status: int, code: str) -> None:
    failed = Failed("t", kind, "it broke", peak_rss_bytes=300 << 20)  # type: ignore[arg-type]
    problem = problem_of(failed)
    assert (problem.status, problem.code) == (status, code)
    assert "it broke" in problem.detail
    assert ("300 MiB" in problem.detail) == (kind == "out_of_memory")
