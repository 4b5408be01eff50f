"""One call of a trainer's ``fit``: steps in flight, evaluations, checkpoints, and what ends it."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradserve.algorithms.log_folder import LogFolder, Saved
from gradserve.algorithms.progress import progress_line
from gradserve.algorithms.schedules import value_at
from gradserve.algorithms.stopping import Budget, EarlyStop
from gradserve.data.dataset import Dataset

if TYPE_CHECKING:
    from gradserve.algorithms.trainer import Trainer

Metrics = dict[str, float]
Answer = Callable[[], Metrics]
"""Waits for a step that was asked for; its metrics."""


class Diverged(RuntimeError):
    """A step gave a loss or a gradient that is not finite. The last checkpoint is from before it."""


@dataclass(frozen=True)
class Event:
    """What a callback is told. ``kind`` is step, evaluation or checkpoint; ``path`` is a checkpoint's."""

    kind: Literal["step", "evaluation", "checkpoint"]
    step: int
    epoch: int
    metrics: Mapping[str, float]
    trainer: Trainer
    path: str = ""


Callback = Callable[[Event], Any]
"""What it returns, if true, ends the training after this step."""


@dataclass(frozen=True)
class Batch:
    """What one step trains on. ``position`` is the dataset's after it, ``epoch`` is from 1."""

    items: Sequence[Any]
    epoch: int
    position: str
    loading_s: float = 0.0


@dataclass(frozen=True)
class Fitted:
    """``history``: one dict per optimizer step of this call; ``path``: the checkpoint of the end, for ``resume``.

    ``stopped`` says why it ended before the last epoch, None when it did not.
    """

    history: list[Metrics]
    evaluations: list[Metrics]
    path: str
    log_dir: Path
    stopped: str | None


class TrainingLoop:
    """One call of ``fit``."""

    def __init__(
        self,
        trainer: Trainer,
        folder: LogFolder,
        dataset: Dataset,
        eval_rows: Sequence[Mapping[str, Any]] | None,
        eval_every: int | None,
        checkpoint_every: int | None,
        early_stop: EarlyStop | None,
        budget: Budget,
        callbacks: tuple[Callback, ...],
    ) -> None:
        self.trainer, self.folder, self.dataset, self.eval_rows = trainer, folder, dataset, eval_rows
        self.eval_every, self.checkpoint_every = eval_every, checkpoint_every
        self.early_stop, self.budget, self.callbacks = early_stop, budget, callbacks
        self.history: list[Metrics] = []
        self.evaluations: list[Metrics] = []
        self.stopped: str | None = None
        self.number = trainer.step
        self._epoch = 1
        self._asked: deque[tuple[int, Batch, Answer, float]] = deque()
        self._last: Batch | None = None
        self._evaluated_at: int | None = None
        self._saved_at: int | None = None
        self._path = ""
        self._began = self._settled_at = time.monotonic()

    def run(self, batch_size: int, epochs: int, resumed: Saved | None) -> Fitted:
        """See Trainer.fit."""
        trainer = self.trainer
        self._total = self._steps_in_all(batch_size, epochs)
        folder = self.folder.path
        with (
            progress_line(trainer.kind, self._total, trainer.step, trainer.shown) as self._show,
            contextlib.closing(trainer._batches(self.dataset, batch_size, epochs)) as batches,
        ):
            if resumed is None:
                self._evaluate()
            else:
                self._epoch, self._evaluated_at = resumed.epoch, resumed.state.get("evaluated_at")
            self._train(batches)
            self._settle(0)
            if self._evaluated_at != trainer.step:
                self._evaluate()
            path = self._checkpoint()
        return Fitted(self.history, self.evaluations, path, folder, self.stopped)

    def _train(self, batches: Iterator[Batch]) -> None:
        for batch in batches:
            if batch.epoch > self._epoch:
                self._settle(0)
                if self.eval_every is None:
                    self._evaluate()
                self._epoch = batch.epoch
            if self.stopped is None:
                self._ask(batch)
                self._settle(0 if self._stops_here() else self.trainer.ahead - 1)
                if self._due(self.checkpoint_every):
                    self._checkpoint()
                if self._due(self.eval_every):
                    self._evaluate()
            if self.stopped is not None:
                break

    def _ask(self, batch: Batch) -> None:
        done = self.number / self._total if self._total else 0.0
        rate = value_at(self.trainer._learning_rate, min(done, 1.0))
        self.number += 1
        self._asked.append((self.number, batch, self.trainer._ask(batch.items, rate), rate))

    def _due(self, every: int | None) -> bool:
        return every is not None and self.number % every == 0

    def _stops_here(self) -> bool:
        """Whether nothing may be in flight after the step that was asked for last."""
        most = self.budget.max_steps
        ends = most is not None and self.number >= most
        return ends or self._due(self.checkpoint_every) or self._due(self.eval_every)

    def _steps_in_all(self, batch_size: int, epochs: int) -> int | None:
        """Optimizer steps of the whole run, where that is known before."""
        rows = self.dataset.known_rows()
        found = None if rows is None else epochs * math.ceil(rows / batch_size)
        if self.budget.max_steps is not None:
            found = min(found or self.budget.max_steps, self.budget.max_steps)
        if found is None and not isinstance(self.trainer._learning_rate, float | int):
            raise ValueError("learning_rate is a schedule and nobody knows how many rows there are: give max_steps")
        return found

    def _settle(self, left: int) -> None:
        """Wait until at most ``left`` steps are in flight."""
        while len(self._asked) > left:
            step, batch, answer, rate = self._asked.popleft()
            metrics = answer()
            self.trainer.step = step
            self._last = batch
            now = time.monotonic()
            times = {"time/data_loading": batch.loading_s, "time/step": now - self._settled_at}
            self._settled_at = now
            self._note(step, batch, metrics | {"optim/lr": rate} | times)
            self._tell(Event("step", step, batch.epoch, self.history[-1], self.trainer))
            if self.stopped is None:
                self.stopped = self.budget.spent(step, self._began, self.trainer._bill_usd)

    def _note(self, step: int, batch: Batch, metrics: Metrics) -> None:
        lost = [name for name in ("loss", "optim/grad_norm") if not math.isfinite(metrics.get(name, 0.0))]
        self.history.append({"step": step, "epoch": batch.epoch, **metrics})
        self._log(step, metrics | {"epoch": batch.epoch})
        if lost:
            before = self.folder.checkpoints
            advice = f"resume from {before[-1].path} with a lower learning_rate" if before else "lower learning_rate"
            raise Diverged(f"step {step}: {lost[0]} is {metrics[lost[0]]}; {advice}")
        self._show(metrics)

    def _log(self, step: int, metrics: Metrics) -> None:
        if self.trainer.tracker is not None:
            self.trainer.tracker.log(step, metrics)

    def _evaluate(self) -> None:
        """Evaluate the run as it is, where there is something to evaluate on."""
        if self.eval_rows is None:
            return
        step = self._evaluated_at = self.trainer.step
        metrics = self.trainer._evaluate(self.eval_rows)
        self.evaluations.append({"step": step, "epoch": self._epoch, **metrics})
        self._log(step, metrics)
        self._tell(Event("evaluation", step, self._epoch, metrics, self.trainer))
        self._settled_at = time.monotonic()
        stop = self.early_stop
        if stop is not None and stop.after(metrics) and self.stopped is None:
            self.stopped = f"{stop.metric} has not become better for {stop.patience} evaluations"

    def _checkpoint(self) -> str:
        if self._saved_at != self.trainer.step:
            state: dict[str, Any] = {"evaluated_at": self._evaluated_at}
            if self.early_stop is not None:
                state["early_stop"] = self.early_stop.state()
            self._path = self.trainer._save(self.folder, self._last, self.dataset, state)
            self._saved_at = self.trainer.step
            self._tell(Event("checkpoint", self.trainer.step, self._epoch, {}, self.trainer, self._path))
        return self._path

    def _tell(self, event: Event) -> None:
        for callback in self.callbacks:
            if callback(event) and self.stopped is None:
                self.stopped = f"a callback ended it after step {event.step}"
