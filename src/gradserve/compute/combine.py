"""Results of parts of a batch as the result of the whole."""

from __future__ import annotations

from collections.abc import Sequence

from gradserve.wire.results import ForwardBackwardResult


def joined(parts: Sequence[ForwardBackwardResult]) -> ForwardBackwardResult:
    """Rows in order, metrics by the suffix after their ":".

    sum adds, min and max choose, mean is weighted by rows; as the SDK itself combines chunks. All parts were computed
    with the same weights: those of the first stand for all.
    """
    logprobs = [row for part in parts for row in part.logprobs]
    metrics = {key: _combined(key, parts) for key in parts[0].metrics}
    return ForwardBackwardResult(logprobs, metrics, parts[0].weights)


def _combined(key: str, parts: Sequence[ForwardBackwardResult]) -> float:
    values = [part.metrics[key] for part in parts]
    match key.rpartition(":")[2]:
        case "sum":
            return sum(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "mean":
            weights = [len(part.logprobs) for part in parts]
            return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
        case other:
            raise ValueError(f"metric {key!r}: no rule to combine {other!r}")
