"""Training-type Tasks -> Outcomes. Pure: what comes out depends on the Task and the objects it names."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.engine import full
from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.base import Base, Bases
from gradserve.compute.engine.drafts import Draft
from gradserve.compute.engine.lora import Tensors, init_adapter
from gradserve.compute.engine.memory import is_out_of_memory, peak_rss_bytes
from gradserve.compute.engine.optim import adamw_step, fold, moments_like
from gradserve.compute.engine.parameters import is_full
from gradserve.compute.engine.train import forward_backward
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
        base = self._bases.get(task.base)
        tensors = base.parameters.tensors() if task.lora is None else init_adapter(base.targets, task.lora)
        return Done(task.id, _usage(started), {"weights": self._arrays.put(tensors)})

    def _grad(self, task: GradTask, started: int) -> Done:
        base = self._bases.get(task.base)
        weights = self._arrays.get(task.weights)
        if is_full(weights):
            return self._full_grad(task, base, weights, started)
        if task.pass_rows:
            raise ValueError("pass_rows are for weights that are a model's parameters")
        rows, gradient = forward_backward(base, weights, task.rows, task.loss, task.config, task.backward)
        tokens = sum(row.length for row in task.rows)
        if gradient is None:
            return Done(task.id, _usage(started, prefill_tokens=tokens), rows=rows)
        objects = {"gradient": self._arrays.put(gradient)}
        return Done(task.id, _usage(started, train_tokens=tokens), objects, rows)

    def _full_grad(self, task: GradTask, base: Base, weights: Tensors, started: int) -> Done:
        """The gradient, as large as the model, is computed where it will lie."""
        tokens = sum(row.length for row in task.rows)
        if not task.backward:
            rows = full.forward(base, weights, task.passes(), task.loss, task.config)
            return Done(task.id, _usage(started, prefill_tokens=tokens), rows=rows)
        with self._arrays.draft(weights) as gradient:
            rows = full.forward_backward(base, weights, task.passes(), task.loss, task.config, gradient.tensors)
            objects = {"gradient": gradient.commit()}
        return Done(task.id, _usage(started, train_tokens=tokens), objects, rows)

    def _reduce(self, task: ReduceTask, started: int) -> Done:
        total = fold(self._arrays.get(digest) for digest in task.gradients)
        return Done(task.id, _usage(started), {"gradient": self._arrays.put(total)})

    def _optim(self, task: OptimTask, started: int) -> Done:
        gradient = fold(self._arrays.get(digest) for digest in task.gradients)
        with self._arrays.copy(self._arrays.get(task.weights)) as weights, self._moments(task) as moments:
            metrics = adamw_step(weights.tensors, moments.tensors, gradient, task.adam)
            objects = {"weights": weights.commit(), "moments": moments.commit()}
        return Done(task.id, _usage(started), objects, metrics=metrics)

    def _moments(self, task: OptimTask) -> Draft:
        if task.moments is None:
            return self._arrays.draft(moments_like(self._arrays.get(task.weights)))
        return self._arrays.copy(self._arrays.get(task.moments))


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
    """An exception as an outcome; only an internal one carries its traceback."""
    kind = _kind(error)
    trace = "".join(traceback.format_exception(error)) if kind == "internal" else ""
    return Failed(task_id, kind, _message(error), trace, peak_rss_bytes())


def _kind(error: BaseException) -> FailureKind:
    if is_out_of_memory(error):
        return "out_of_memory"
    return "user" if isinstance(error, UserError | ModelUnusable) else "internal"


def _message(error: BaseException) -> str:
    if isinstance(error, UserError):
        problem = error.problem()
        return problem.detail if problem.index is None else f"row {problem.index}: {problem.detail}"
    return str(error) if isinstance(error, ModelUnusable) else f"{type(error).__name__}: {error}"
