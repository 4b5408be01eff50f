"""Training-type Tasks -> Outcomes. Pure: what comes out depends on the Task and the objects it names."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import msgspec

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.base import Bases
from gradserve.compute.engine.lora import init_adapter
from gradserve.compute.engine.memory import is_out_of_memory, peak_rss_bytes
from gradserve.compute.engine.optim import adamw_step, fold
from gradserve.compute.engine.origin import Origin, WrongOrigin, common, require
from gradserve.compute.engine.train import forward_backward
from gradserve.compute.objects import ObjectCorrupt
from gradserve.compute.tasks import (
    Done,
    Failed,
    FailureKind,
    GradTask,
    InitTask,
    OptimTask,
    Outcome,
    ReduceTask,
    Usage,
)
from gradserve.wire.errors import UserError

TrainingTask = InitTask | GradTask | ReduceTask | OptimTask


class Engine:
    """Runs one training-type Task at a time. ``run`` never raises: a failure is an Outcome."""

    def __init__(self, bases: Bases, arrays: Arrays) -> None:
        self._bases = bases
        self._arrays = arrays

    def run(self, task: TrainingTask) -> Outcome:
        """The Task's outcome, with the wall time it took."""
        started = time.perf_counter_ns()
        return attempt(task.id, lambda: self._run(task, started))

    def _run(self, task: TrainingTask, started: int) -> Done:
        match task:
            case InitTask():
                return self._init(task, started)
            case GradTask():
                return self._grad(task, started)
            case ReduceTask():
                return self._reduce(task, started)
            case OptimTask():
                return self._optim(task, started)

    def _init(self, task: InitTask, started: int) -> Done:
        tensors = init_adapter(self._bases.get(task.base).targets, task.lora)
        return Done(task.id, _usage(started), {"weights": self._arrays.put(tensors)})

    def _grad(self, task: GradTask, started: int) -> Done:
        base = self._bases.get(task.base)
        weights = self._arrays.get(task.weights)
        rows, gradient = forward_backward(base, weights, task.rows, task.loss, task.config, task.backward)
        rows = msgspec.structs.replace(rows, weights=task.weights)
        tokens = sum(row.length for row in task.rows)
        if gradient is None:
            return Done(task.id, _usage(started, prefill_tokens=tokens), rows=rows)
        objects = {"gradient": self._arrays.put(gradient, Origin(task.weights, task.base))}
        return Done(task.id, _usage(started, train_tokens=tokens), objects, rows)

    def _reduce(self, task: ReduceTask, started: int) -> Done:
        origin = common(self._arrays.origin(digest) for digest in task.gradients)
        total = fold(self._arrays.get(digest) for digest in task.gradients)
        return Done(task.id, _usage(started), {"gradient": self._arrays.put(total, origin)})

    def _optim(self, task: OptimTask, started: int) -> Done:
        self._check_origins(task)
        moments = None if task.moments is None else self._arrays.get(task.moments)
        gradient = fold(self._arrays.get(digest) for digest in task.gradients)
        weights, moments, metrics = adamw_step(self._arrays.get(task.weights), moments, gradient, task.adam)
        made = self._arrays.put(weights)
        objects = {"weights": made, "moments": self._arrays.put(moments, Origin(made))}
        return Done(task.id, _usage(started), objects, metrics=metrics)

    def _check_origins(self, task: OptimTask) -> None:
        """A step takes gradients and moments of its own weights only. (Moments of older servers do not say theirs.)"""
        for digest in task.gradients:
            require(self._arrays.origin(digest), task.weights, f"gradient {digest}")
        if task.moments is not None:
            origin = self._arrays.origin(task.moments)
            if origin is not None:
                require(origin, task.weights, f"moments {task.moments}")


def _usage(started: int, train_tokens: int = 0, prefill_tokens: int = 0) -> Usage:
    elapsed_us = (time.perf_counter_ns() - started) // 1000
    return Usage(train_tokens=train_tokens, prefill_tokens=prefill_tokens, compute_us=elapsed_us)


def attempt(task_id: str, compute: Callable[[], Done]) -> Outcome:
    """What ``compute`` returns, or the Failed that says who can mend it."""
    try:
        return compute()
    except Exception as error:
        return failure(task_id, error)


def failure(task_id: str, error: BaseException) -> Failed:
    """An exception as an outcome; one that is not the caller's carries its traceback."""
    kind = _kind(error)
    trace = "".join(traceback.format_exception(error)) if kind in ("internal", "corrupt", "mismatch") else ""
    return Failed(task_id, kind, _message(error), trace, peak_rss_bytes())


def _kind(error: BaseException) -> FailureKind:
    if is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, ObjectCorrupt):
        return "corrupt"
    if isinstance(error, WrongOrigin):
        return "mismatch"
    return "user" if isinstance(error, UserError | ModelUnusable) else "internal"


def _message(error: BaseException) -> str:
    if isinstance(error, UserError):
        problem = error.problem()
        return problem.detail if problem.index is None else f"row {problem.index}: {problem.detail}"
    if isinstance(error, ObjectCorrupt):
        return f"object {error.digest} is damaged"  # where it lies is for the log: it is in the traceback
    return str(error) if isinstance(error, ModelUnusable | WrongOrigin) else f"{type(error).__name__}: {error}"
