"""One log call for every sink."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gradserve.tracking.sinks import ALWAYS, Begin, Sink, open_sink

log = logging.getLogger(__name__)

_COLUMNS = ("step", "time")
"""Of metrics.jsonl; no metric can have these names."""


class Tracker:
    """Writes a run's metrics and texts to its folder and to the services that are asked for.

    >>> with Tracker("runs/sum", sinks=("wandb",), run_name="sum", config={"learning_rate": 1e-4}) as tracker:
    ...     tracker.log(1, {"reward/mean": 0.25, "optim/loss": 0.7})
    ...     tracker.text(1, "sample", "**2 + 2 =** 4")

    ``metrics.jsonl`` and TensorBoard's event files are always written; ``sinks`` names what else is: ``wandb``,
    ``mlflow``. To go on with an interrupted run, ``resume_step`` is the last step that counts: what the interrupted run
    logged after it is cut off, as those steps come again. SinkUnusable, at construction only, says what to install or
    to change. A sink that fails later is warned about once; ``failures`` counts by name what it has missed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        sinks: Sequence[str] = ALWAYS,
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> None:
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        begin = Begin(place, run_name or place.resolve().name, config or {}, resume_step)
        self.failures: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._sinks: dict[str, Sink] = {}
        try:
            for name in dict.fromkeys((*ALWAYS, *sinks)):
                self._sinks[name] = open_sink(name, begin)
        except BaseException:
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Each call is a line of metrics.jsonl; a step's training and its evaluation may be two.

        A value that is not finite is written as null, and warned about once by name. Raises ValueError for what is no
        number and for the names that metrics.jsonl has for itself.
        """
        values = {name: self._finite(step, name, value) for name, value in metrics.items()}
        now = time.time()
        self._each(lambda sink: sink.metrics(step, now, values))

    def text(self, step: int, name: str, markdown: str) -> None:
        """Something to read: a sample answer, a table. Metrics alone can't tell learning from hacking."""
        now = time.time()
        self._each(lambda sink: sink.text(step, now, name, markdown))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = {}

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _each(self, act: Callable[[Sink], None]) -> None:
        for name, sink in self._sinks.items():
            try:
                act(sink)
            except Exception as error:  # Whatever a sink's library raises: the training is worth more than its log.
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        if not self.failures[name]:
            log.warning("tracking: %s failed and is tried again at each step; the training goes on: %r", name, error)
        self.failures[name] += 1

    def _finite(self, step: int, name: str, value: float) -> float | None:
        if name in _COLUMNS:
            raise ValueError(f"a metric can't be called {name!r}: metrics.jsonl has a column of that name")
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metric {name} is {value!r}, not a number") from error
        if math.isfinite(number):
            return number
        if name not in self._warned:
            self._warned.add(name)
            log.warning("step %d: metric %s is %s; it is written as null (said once)", step, name, number)
        return None
