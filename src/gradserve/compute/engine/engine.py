"""Training-type Tasks -> Outcomes. Pure: what comes out depends on the Task and the objects it names."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

import msgspec
import torch

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.engine import full, staged
from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.base import Bases
from gradserve.compute.engine.drafts import Draft
from gradserve.compute.engine.graph_store import BoundedGraph, GraphStore
from gradserve.compute.engine.lora import Tensors, init_adapter, init_value_head
from gradserve.compute.engine.memory import is_out_of_memory, peak_rss_bytes
from gradserve.compute.engine.memory_plan import Dimensions, TooLarge, choose
from gradserve.compute.engine.modules import MODULE, Modules
from gradserve.compute.engine.objectives import Cotangents, GraphLoss, Objective
from gradserve.compute.engine.optim import adamw_step_in_place, fold, moments_like, optimizer_step
from gradserve.compute.engine.origin import Origin, WrongOrigin, common, require
from gradserve.compute.engine.parameters import is_full
from gradserve.compute.engine.train import (
    Computed,
    Job,
    check_loss,
    forward_backward,
    outline,
    prepare,
    prepare_for,
    rows_of,
    score_job,
)
from gradserve.compute.objects import ObjectCorrupt
from gradserve.compute.tasks import (
    CheckTask,
    Digest,
    Done,
    Failed,
    FailureKind,
    GradTask,
    InitTask,
    LossTask,
    ModuleTask,
    OptimTask,
    Outcome,
    ReduceTask,
    ScoreTask,
    Usage,
)
from gradserve.wire.errors import Invalid, UserError
from gradserve.wire.ops import AdamParams, graph_of
from gradserve.wire.results import ForwardBackwardResult

_Step = tuple[dict[str, Digest], dict[str, float]]
"""Objects and metrics of an optimizer step."""

TrainingTask = InitTask | GradTask | ScoreTask | LossTask | CheckTask | ReduceTask | OptimTask | ModuleTask


class Engine:
    """Runs training-type Tasks. Nothing here raises: a failure is an Outcome.

    ``memory_bytes`` is what one pass may take above the weights; None: no bound. ``between`` is called between two
    passes of one Task; what it takes is not on the Task's account.
    """

    def __init__(
        self,
        bases: Bases,
        arrays: Arrays,
        memory_bytes: int | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._bases = bases
        self._arrays = arrays
        self._graphs = GraphStore(arrays)
        self._modules = Modules(arrays, self._graphs)
        self._memory_bytes = memory_bytes
        self._between = between

    def run(self, task: TrainingTask) -> Outcome:
        """The Task's outcome, with the wall time it took."""
        if isinstance(task, GradTask) and not task.pass_rows:
            return self.run_together([task])[0]
        started = time.perf_counter_ns()
        return attempt(task.id, lambda: self._run(task, started))

    def run_together(self, tasks: list[GradTask]) -> list[Outcome]:
        """GradTasks of one base and one direction in one pass: each gets the outcome that it would get alone.

        What is wrong with one of them fails that one. When the pass itself fails (memory, say), they are run singly.
        A Task on all parameters of the base shares its passes with none.
        """
        if any(task.pass_rows for task in tasks):
            rest = iter(self.run_together([task for task in tasks if not task.pass_rows]))
            return [self.run(task) if task.pass_rows else next(rest) for task in tasks]
        started = time.perf_counter_ns()
        prepared = {task.id: attempt(task.id, partial(self._prepare, task)) for task in tasks}
        ready = [task for task in tasks if isinstance(prepared[task.id], Job)]
        jobs = [job for job in (prepared[task.id] for task in ready) if isinstance(job, Job)]
        done = self._pass(ready, jobs, started) if ready else {}
        outcomes = prepared | done
        return [outcome for outcome in (outcomes[task.id] for task in tasks) if not isinstance(outcome, Job)]

    def _prepare(self, task: GradTask) -> Job:
        base, weights = self._bases.get(task.base), self._arrays.get(task.weights)
        objective = self._objective(task, base.device)
        if objective is not None:
            return prepare_for(base, weights, task.rows, objective)
        return prepare(base, weights, task.rows, task.loss, task.config)

    def _objective(self, task: GradTask, device: torch.device) -> Objective | None:
        """What a Task with something else than a public loss differentiates."""
        if task.cotangents is not None:
            given = self._arrays.read(task.cotangents)
            require(given.origin, task.weights, f"cotangents {task.cotangents}")
            return Cotangents(staged.of_part(given.tensors, task.part))
        return None if graph_of(task.loss) is None else GraphLoss(self._graph(task.loss), task.rows, device)

    def _pass(self, tasks: list[GradTask], jobs: list[Job], started: int) -> dict[str, Outcome]:
        try:
            base, backward = self._bases.get(tasks[0].base), tasks[0].backward
            plan = choose(Dimensions.of(base.config), outline(jobs, backward), self._memory_bytes)
            computed = forward_backward(base, jobs, backward, plan)
        except Exception as error:
            if len(tasks) == 1:
                return {tasks[0].id: failure(tasks[0].id, error)}
            return {task.id: self.run(task) for task in tasks}
        stored = [
            attempt(task.id, partial(self._store, task, found)) for task, found in zip(tasks, computed, strict=True)
        ]
        shares = divide(_elapsed_us(started), [task.tokens for task in tasks])
        return {
            task.id: outcome if isinstance(outcome, Failed) else _done(task, *outcome, share)
            for task, outcome, share in zip(tasks, stored, shares, strict=True)
        }

    def _store(self, task: GradTask, found: Computed | Invalid) -> tuple[ForwardBackwardResult, dict[str, Digest]]:
        if isinstance(found, Invalid):
            raise found
        result, gradient = found
        result = msgspec.structs.replace(result, weights=task.weights)
        if task.cotangents is not None:
            result = ForwardBackwardResult([], {}, task.weights)
        if gradient is None:
            return result, {}
        return result, {"gradient": self._arrays.put(gradient, Origin(task.weights, task.base))}

    def _run(self, task: TrainingTask, started: int) -> Done:
        match task:
            case InitTask():
                return self._init(task, started)
            case GradTask():
                return self._full_grad(task, started)
            case ScoreTask():
                return self._score(task, started)
            case LossTask():
                return self._loss(task, started)
            case CheckTask():
                return self._check(task, started)
            case ReduceTask():
                return self._reduce(task, started)
            case OptimTask():
                return self._optim(task, started)
            case _:
                return self._modules.run(task, started)

    def _init(self, task: InitTask, started: int) -> Done:
        base = self._bases.get(task.base)
        if task.lora is not None:
            head = init_value_head(base.config.hidden_size) if task.lora.value_head else {}
            weights = self._arrays.put(init_adapter(base.targets, task.lora) | head)
        else:
            with self._arrays.copy(base.parameters.tensors()) as draft:
                weights = self._arrays.commit(draft)
        return Done(task.id, _usage(started), {"weights": weights})

    def _full_grad(self, task: GradTask, started: int) -> Done:
        """The gradient, as large as the model, is computed where it will lie."""
        base, weights = self._bases.get(task.base), self._arrays.get(task.weights)
        if not is_full(weights):
            raise ValueError(f"{task.weights} is an adapter, and pass_rows are for all parameters of a base")
        graph = None if graph_of(task.loss) is None else self._graph(task.loss)
        pauses = _Pauses(self._between)
        objects = {}
        if task.backward:
            with self._arrays.draft(weights, Origin(task.weights, task.base)) as draft:
                rows = full.forward_backward(base, weights, task, graph, draft.tensors, pauses.take)
                objects["gradient"] = self._arrays.commit(draft)
        else:
            rows = full.forward(base, weights, task, graph, pauses.take)
        rows = msgspec.structs.replace(rows, weights=task.weights)
        return _done(task, rows, objects, _elapsed_us(started + pauses.total_ns))

    def _score(self, task: ScoreTask, started: int) -> Done:
        base, weights = self._bases.get(task.base), self._arrays.get(task.weights)
        objective = GraphLoss(self._graph(task.loss), task.rows, base.device)
        job = prepare_for(base, weights, task.rows, objective)
        plan = choose(Dimensions.of(base.config), outline([job], False), self._memory_bytes)
        found = score_job(base, job, plan)
        made = self._arrays.put(found.named(), Origin(task.weights, task.base))
        rows = ForwardBackwardResult(rows_of(job.packed, found.logprobs), {}, task.weights)
        return Done(task.id, _usage(started), {"scores": made}, rows)

    def _loss(self, task: LossTask, started: int) -> Done:
        parts = [self._arrays.read(digest) for digest in task.scores]
        for digest, part in zip(task.scores, parts, strict=True):
            require(part.origin, task.weights, f"scores {digest}")
        tensors = [part.tensors for part in parts]
        found, metrics = staged.cotangents(self._graph(task.loss), task.rows, tensors, task.part_rows)
        check_loss(metrics)
        made = self._arrays.put(staged.numbered(found), Origin(task.weights, task.base))
        rows = ForwardBackwardResult([], metrics, task.weights)
        return Done(task.id, _usage(started), {"cotangents": made}, rows)

    def _graph(self, loss: str) -> BoundedGraph:
        digest = graph_of(loss)
        if digest is None:
            raise ValueError(f"{loss} is no graph")
        return self._graphs.get(digest)

    def _check(self, task: CheckTask, started: int) -> Done:
        self._graphs.get(task.graph).try_out()
        return Done(task.id, _usage(started))

    def _reduce(self, task: ReduceTask, started: int) -> Done:
        gradients = [self._arrays.read(digest) for digest in task.gradients]
        origin = common(gradient.origin for gradient in gradients)
        total = fold(gradient.tensors for gradient in gradients)
        return Done(task.id, _usage(started), {"gradient": self._arrays.put(total, origin)})

    def _optim(self, task: OptimTask, started: int) -> Done:
        """A step takes gradients and moments of its own weights only. (Moments of older servers do not say theirs.)"""
        gradients = [self._arrays.read(digest) for digest in task.gradients]
        for digest, gradient in zip(task.gradients, gradients, strict=True):
            require(gradient.origin, task.weights, f"gradient {digest}")
        moments = None if task.moments is None else self._arrays.read(task.moments)
        if moments is not None and moments.origin is not None:
            require(moments.origin, task.weights, f"moments {task.moments}")
        old, total = self._arrays.get(task.weights), fold(gradient.tensors for gradient in gradients)
        known = None if moments is None else moments.tensors
        of_module = any(gradient.origin is not None and gradient.origin.base == MODULE for gradient in gradients)
        if is_full(old) and not of_module:
            objects, metrics = self._full_step(old, known, total, _plain_adamw(task))
        else:
            objects, metrics = self._step(old, known, total, task)
        return Done(task.id, _usage(started), objects, metrics=metrics)

    def _step(self, old: Tensors, moments: Tensors | None, gradient: Tensors, task: OptimTask) -> _Step:
        rule = task.adam if task.sgd is None else task.sgd
        weights, moments, metrics = optimizer_step(old, moments, gradient, rule, task.coupled_decay)
        made = self._arrays.put(weights)
        return {"weights": made, "moments": self._arrays.put(moments, Origin(made))}, metrics

    def _full_step(self, old: Tensors, moments: Tensors | None, gradient: Tensors, adam: AdamParams) -> _Step:
        """Computed in the objects that it makes: nothing else of their size is needed."""
        with self._arrays.copy(old) as weights, self._moments_draft(old, moments) as new_moments:
            metrics = adamw_step_in_place(weights.tensors, new_moments.tensors, gradient, adam)
            made = self._arrays.commit(weights)
            return {"weights": made, "moments": self._arrays.commit(new_moments, Origin(made))}, metrics

    def _moments_draft(self, weights: Tensors, moments: Tensors | None) -> Draft:
        not_yet_known = Origin("0" * 64)
        if moments is None:
            return self._arrays.draft(moments_like(weights), not_yet_known)
        return self._arrays.copy(moments, not_yet_known)


def _plain_adamw(task: OptimTask) -> AdamParams:
    if task.sgd is not None or task.coupled_decay:
        raise Invalid("optimizer", "all parameters of a language model are trained by AdamW alone.", field="optimizer")
    return task.adam


class _Pauses:
    """Lets others have a turn and remembers how long that took."""

    def __init__(self, between: Callable[[], None]) -> None:
        self._between = between
        self.total_ns = 0

    def take(self) -> None:
        started = time.perf_counter_ns()
        self._between()
        self.total_ns += time.perf_counter_ns() - started


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
    """An exception as an outcome; one that is not the caller's carries its traceback."""
    kind = _kind(error)
    trace = "".join(traceback.format_exception(error)) if kind in ("internal", "corrupt", "mismatch") else ""
    index = error.index if isinstance(error, TooLarge) else None
    return Failed(task_id, kind, _message(error), trace, peak_rss_bytes(), index)


def _kind(error: BaseException) -> FailureKind:
    if is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, ObjectCorrupt):
        return "corrupt"
    if isinstance(error, WrongOrigin):
        return "mismatch"
    if isinstance(error, TooLarge):
        return "too_large"
    return "user" if isinstance(error, UserError | ModelUnusable) else "internal"


def _message(error: BaseException) -> str:
    if isinstance(error, UserError):
        problem = error.problem()
        return problem.detail if problem.index is None else f"row {problem.index}: {problem.detail}"
    if isinstance(error, ObjectCorrupt):
        return f"object {error.digest} is damaged"  # where it lies is for the log: it is in the traceback
    return (
        str(error) if isinstance(error, ModelUnusable | TooLarge | WrongOrigin) else f"{type(error).__name__}: {error}"
    )
