"""What the trainers on pairs share: a loss over chosen and rejected rows, in one pass or in the SDK's two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradserve.algorithms.datums import datum, scored
from gradserve.algorithms.trainer import Trainer
from gradserve.algorithms.training_loop import Metrics
from gradserve.client.bills import bill_of
from gradserve.client.extensions import ExtensionError
from gradserve.episodes.tokens import Rendered

_PAIRS_AT_ONCE = 64
"""In one request, so that the SDK does not cut one between the rows of a pair."""


@dataclass(frozen=True)
class Requested:
    """A gradient that is under way: a future and its rows for each request."""

    futures: list[tuple[Any, Sequence[Rendered]]]

    def result(self) -> tuple[float, list[float]]:
        """The loss, and every row's weighted log-prob as the pass saw it."""
        loss, picked = 0.0, []
        for future, rows in self.futures:
            found = future.result()
            loss += found.metrics["loss:sum"]
            picked += summed(found.loss_fn_outputs, rows)
        return loss, picked


def summed(outputs: Sequence[Any], rows: Sequence[Rendered]) -> list[float]:
    """Σ weights·log p of each row."""
    return [
        float((scored(output) * row.weights[1:]).sum(dtype="float64"))
        for output, row in zip(outputs, rows, strict=True)
    ]


class PairTrainer(Trainer):
    """A loss of gradserve.compiler.pair_losses on rows that alternate: chosen, rejected."""

    _loss_name: str
    """A function of gradserve.compiler.pair_losses."""
    _loss_settings: Mapping[str, Any] = {}

    def _begin(self) -> None:
        from gradserve.compiler import pair_losses
        from gradserve.compiler.losses import loss

        function = getattr(pair_losses, self._loss_name)
        self._function = function
        per_row = [name for name in ("reference", "share") if name in function.__annotations__]
        self._loss = (
            loss(function, inputs=dict.fromkeys(per_row, "float32[row]"), **self._loss_settings)
            if self._runs_graphs()
            else None
        )

    def _runs_graphs(self) -> bool:
        """Whether the service is a gradserve, whose extension routes answer."""
        try:
            bill_of(self.run)
        except ExtensionError as error:
            if error.status is None or error.status >= 500:
                raise
            return False
        return True

    def _gradient(self, rows: Sequence[Rendered], **per_row: Sequence[float]) -> Requested:
        """Ask for the gradient of the mean loss over the pairs of ``rows`` [2 P]; ``per_row`` [2 P] inputs by name."""
        share = 2 / len(rows)
        futures = []
        for start in range(0, len(rows), 2 * _PAIRS_AT_ONCE):
            part = slice(start, start + 2 * _PAIRS_AT_ONCE)
            some = rows[part]
            given = {name: list(values[part]) for name, values in per_row.items()} | {"share": [share] * len(some)}
            futures.append((self._request(some, given), some))
        return Requested(futures)

    def _request(self, rows: Sequence[Rendered], given: dict[str, list[float]]) -> Any:
        import numpy as np
        from tinker import types

        data = [datum(row.tokens, weights=row.weights) for row in rows]
        if self._loss is None:
            from gradserve.compiler.pair_losses import on_client

            weights = [list(row.weights[1:]) for row in rows]
            return self.run.forward_backward_custom(
                data, on_client(self._function, weights, **given, **self._loss_settings)
            )
        for name, values in given.items():
            for item, value in zip(data, values, strict=True):
                item.loss_fn_inputs[name] = types.TensorData.from_numpy(np.array([value], dtype=np.float32))
        return self.run.forward_backward(data, self._loss)

    def _forward(self, rows: Sequence[Rendered]) -> list[float]:
        """Every row's weighted log-prob under the run as it is now."""
        found: list[float] = []
        for start in range(0, len(rows), 2 * _PAIRS_AT_ONCE):
            some = rows[start : start + 2 * _PAIRS_AT_ONCE]
            data = [datum(row.tokens, weights=row.weights) for row in some]
            found += summed(self.run.forward(data, "cross_entropy").result().loss_fn_outputs, some)
        return found


def margins_of(values: Sequence[float]) -> list[float]:
    """Chosen minus rejected, of values that alternate."""
    return [one - other for one, other in zip(values[0::2], values[1::2], strict=True)]


def pair_metrics(values: Sequence[float], name: str) -> Metrics:
    """Accuracy and margins of values [2 P] that alternate, with both means under ``name``."""
    margins = margins_of(values)
    count = len(margins)
    return {
        "accuracy": sum(margin > 0 for margin in margins) / count,
        "margin": sum(margins) / count,
        f"{name}/chosen": sum(values[0::2]) / count,
        f"{name}/rejected": sum(values[1::2]) / count,
    }
