"""What a training will do, in numbers, before it begins: nobody has to multiply batch by group by epoch in the head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gradserve.algorithms.tasks.keywords import constructor_keywords
from gradserve.algorithms.tasks.task import Task
from gradserve.data.dataset import Dataset

_GROUPS = ("group_size", "samples")
"""What trainers call the number of answers to a row."""


@dataclass(frozen=True)
class Plan:
    """``rows`` and ``steps`` are None where nobody knows before; ``steps`` are the optimizer's, of the whole run.

    ``group_size`` answers are sampled to a row, which ``group_keyword`` says; ``max_tokens`` is None where none are.
    """

    rows: int | None
    batch_size: int
    epochs: int
    max_steps: int | None
    group_size: int = 1
    max_tokens: int | None = None
    group_keyword: str = "group_size"

    @property
    def steps_per_epoch(self) -> int | None:
        """An epoch's last batch may be smaller."""
        return None if self.rows is None else math.ceil(self.rows / self.batch_size)

    @property
    def steps(self) -> int | None:
        """What epochs and max_steps allow."""
        if self.steps_per_epoch is None:
            return self.max_steps
        return min(self.epochs * self.steps_per_epoch, self.max_steps or self.epochs * self.steps_per_epoch)

    @property
    def episodes_per_step(self) -> int:
        """Samples that one optimizer step takes in."""
        return self.batch_size * self.group_size

    def lines(self) -> list[str]:
        """For people."""
        step = f"a step: {self.batch_size:,} rows"
        if self.max_tokens is not None:
            tokens = self.episodes_per_step * self.max_tokens
            step = (
                f"a step: batch_size {self.batch_size:,} rows x {self.group_keyword} {self.group_size:,} = "
                f"{self.episodes_per_step:,} episodes, at most {tokens:,} sampled tokens a turn"
            )
        return [step, self._steps_in_words()]

    def _steps_in_words(self) -> str:
        if self.steps_per_epoch is None:
            limit = "" if self.max_steps is None else f", at most {self.max_steps:,}"
            return f"steps: how many rows there are is not known before they are read{limit}"
        all_steps = self.epochs * self.steps_per_epoch
        said = (
            f"steps: {self.rows:,} rows / {self.batch_size:,} = {self.steps_per_epoch:,} an epoch, x {self.epochs:,} "
            f"epochs = {all_steps:,} optimizer steps"
        )
        return said if self.steps == all_steps else f"{said}, ended at max_steps {self.max_steps:,}"


def plan_of(task: Task, dataset: Dataset) -> Plan:
    """``dataset`` is the task's for training."""
    keywords = constructor_keywords(task.trainer)

    def told(name: str) -> Any:
        return task.told(name) if name in keywords else None

    group_keyword = next((name for name in _GROUPS if name in keywords), _GROUPS[0])
    return Plan(
        rows=dataset.known_rows(),
        batch_size=task.told("batch_size"),
        epochs=task.told("epochs"),
        max_steps=task.told("max_steps"),
        group_size=told(group_keyword) or 1,
        max_tokens=told("max_tokens"),
        group_keyword=group_keyword,
    )
