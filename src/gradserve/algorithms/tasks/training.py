"""A task that is about to be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradserve.algorithms.tasks.calls import made
from gradserve.algorithms.tasks.manifest import refuse_other_data
from gradserve.algorithms.tasks.plan import Plan, plan_of
from gradserve.algorithms.tasks.task import Task
from gradserve.algorithms.trainer import Trainer
from gradserve.algorithms.training_loop import Callback, Fitted
from gradserve.data.dataset import Dataset


@dataclass(frozen=True)
class Training:
    """``told`` is what fit is told, with its objects made."""

    task: Task
    told: Mapping[str, Any]
    plan: Plan

    def trainer(self) -> Trainer:
        """Make it; it is for a ``with`` block."""
        trainer: Trainer = self.task.constructor()
        return trainer

    def fit(self, trainer: Trainer, resume: bool = False, callbacks: Sequence[Callback] = ()) -> Fitted:
        """Train."""
        return trainer.fit(**self.told, resume=resume, callbacks=callbacks)


def ready(task: Task) -> Training:
    """Read the data, and say what will be done.

    Raises DataError; TaskError for a manifest whose data has changed.
    """
    told = made(task.fit)
    if not isinstance(told["train_data"], Dataset):  # as fit would, but the rows are read once
        told["train_data"] = Dataset(told["train_data"], shuffle_seed=task.told("seed"))
    refuse_other_data(task.record, told["train_data"])
    return Training(task, told, plan_of(task, told["train_data"]))
