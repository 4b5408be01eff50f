"""Training-type Tasks -> Outcomes. Pure: what comes out depends on the Task and the objects it names."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.base import Bases
from gradserve.compute.engine.lora import init_adapter
from gradserve.compute.engine.memory import is_out_of_memory, peak_rss_bytes
from gradserve.compute.engine.memory_plan import Dimensions, TooLarge, choose
from gradserve.compute.engine.optim import adamw_step, fold
from gradserve.compute.engine.train import Computed, Job, forward_backward, outline, prepare
from gradserve.compute.tasks import (
    Digest,
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
from gradserve.wire.errors import Invalid, UserError
from gradserve.wire.results import ForwardBackwardResult

TrainingTask = InitTask | GradTask | ReduceTask | OptimTask


class Engine:
    """Runs training-type Tasks. Nothing here raises: a failure is an Outcome."""

    def __init__(self, bases: Bases, arrays: Arrays, memory_bytes: int | None = None) -> None:
        """``memory_bytes`` is what one pass may take above the weights; None: no bound."""
        self._bases = bases
        self._arrays = arrays
        self._memory_bytes = memory_bytes

    def run(self, task: TrainingTask) -> Outcome:
        """The Task's outcome, with the wall time it took."""
        if isinstance(task, GradTask):
            return self.run_together([task])[0]
        started = time.perf_counter_ns()
        return attempt(task.id, lambda: self._run(task, started))

    def run_together(self, tasks: list[GradTask]) -> list[Outcome]:
        """GradTasks of one base and one direction in one pass: each gets the outcome that it would get alone.

        What is wrong with one of them fails that one. When the pass itself fails (memory, say), they are run singly.
        """
        started = time.perf_counter_ns()
        prepared = {task.id: attempt(task.id, partial(self._prepare, task)) for task in tasks}
        ready = [task for task in tasks if isinstance(prepared[task.id], Job)]
        jobs = [job for job in (prepared[task.id] for task in ready) if isinstance(job, Job)]
        done = self._pass(ready, jobs, started) if ready else {}
        outcomes = prepared | done
        return [outcome for outcome in (outcomes[task.id] for task in tasks) if not isinstance(outcome, Job)]

    def _prepare(self, task: GradTask) -> Job:
        weights = self._arrays.get(task.weights)
        return prepare(self._bases.get(task.base), weights, task.rows, task.loss, task.config)

    def _pass(self, tasks: list[GradTask], jobs: list[Job], started: int) -> dict[str, Outcome]:
        try:
            base, backward = self._bases.get(tasks[0].base), tasks[0].backward
            plan = choose(Dimensions.of(base.config), outline(jobs, backward), self._memory_bytes)
            computed = forward_backward(base, jobs, backward, plan)
        except Exception as error:
            if len(tasks) == 1:
                return {tasks[0].id: failure(tasks[0].id, error)}
            return {task.id: self.run(task) for task in tasks}
        stored = [attempt(task.id, partial(self._store, found)) for task, found in zip(tasks, computed, strict=True)]
        shares = divide(_elapsed_us(started), [task.tokens for task in tasks])
        return {
            task.id: outcome if isinstance(outcome, Failed) else _done(task, *outcome, share)
            for task, outcome, share in zip(tasks, stored, shares, strict=True)
        }

    def _store(self, found: Computed | Invalid) -> tuple[ForwardBackwardResult, dict[str, Digest]]:
        if isinstance(found, Invalid):
            raise found
        result, gradient = found
        return result, {} if gradient is None else {"gradient": self._arrays.put(gradient)}

    def _run(self, task: InitTask | ReduceTask | OptimTask, started: int) -> Done:
        match task:
            case InitTask():
                return self._init(task, started)
            case ReduceTask():
                return self._reduce(task, started)
            case OptimTask():
                return self._optim(task, started)

    def _init(self, task: InitTask, started: int) -> Done:
        tensors = init_adapter(self._bases.get(task.base).targets, task.lora)
        return Done(task.id, _usage(started), {"weights": self._arrays.put(tensors)})

    def _reduce(self, task: ReduceTask, started: int) -> Done:
        total = fold(self._arrays.read(digest) for digest in task.gradients)
        return Done(task.id, _usage(started), {"gradient": self._arrays.put(total)})

    def _optim(self, task: OptimTask, started: int) -> Done:
        moments = None if task.moments is None else self._arrays.read(task.moments)
        gradient = fold(self._arrays.read(digest) for digest in task.gradients)
        weights, moments, metrics = adamw_step(self._arrays.get(task.weights), moments, gradient, task.adam)
        objects = {"weights": self._arrays.put(weights), "moments": self._arrays.put(moments)}
        return Done(task.id, _usage(started), objects, metrics=metrics)


def divide(amount: int, weights: list[int]) -> list[int]:
    """``amount`` in whole parts that are as the weights and add up to it."""
    total = sum(weights)
    bounds = [amount * reached // total for reached in accumulate(weights)]
    return [upper - lower for lower, upper in pairwise([0, *bounds])]


def _done(task: GradTask, result: ForwardBackwardResult, objects: dict[str, Digest], compute_us: int) -> Done:
    kind = "train_tokens" if task.backward else "prefill_tokens"
    return Done(task.id, Usage(**{kind: task.tokens, "compute_us": compute_us}), objects, result)


def _usage(started: int) -> Usage:
    return Usage(compute_us=_elapsed_us(started))


def _elapsed_us(started: int) -> int:
    return (time.perf_counter_ns() - started) // 1000


Made = TypeVar("Made")


def attempt(task_id: str, compute: Callable[[], Made]) -> Made | Failed:
    """What ``compute`` returns, or the Failed that says who can mend it."""
    try:
        return compute()
    except Exception as error:
        return failure(task_id, error)


def failure(task_id: str, error: BaseException) -> Failed:
    """An exception as an outcome; only an internal one carries its traceback."""
    kind = _kind(error)
    trace = "".join(traceback.format_exception(error)) if kind == "internal" else ""
    index = error.index if isinstance(error, TooLarge) else None
    return Failed(task_id, kind, _message(error), trace, peak_rss_bytes(), index)


def _kind(error: BaseException) -> FailureKind:
    if is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, TooLarge):
        return "too_large"
    return "user" if isinstance(error, UserError | ModelUnusable) else "internal"


def _message(error: BaseException) -> str:
    if isinstance(error, UserError):
        problem = error.problem()
        return problem.detail if problem.index is None else f"row {problem.index}: {problem.detail}"
    return str(error) if isinstance(error, ModelUnusable | TooLarge) else f"{type(error).__name__}: {error}"
