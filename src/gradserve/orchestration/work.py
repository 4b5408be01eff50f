"""What the steps of a Program make and compute, from sizes alone: nothing is run, and torch is not needed.

FLOPs of language models: 2 per token and number of a matrix forward, twice that backward, half of it for the inputs'
gradient and half for the matrices' own (Kaplan et al. 2020, arXiv:2001.08361, section 2.1: 6 N per token). A frozen
matrix has no gradient of its own: 4 N. Attention's products of tokens with tokens are not counted, as there.
Graphs are measured by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gradserve.compute.sizes import ModelSize
from gradserve.compute.tasks import (
    CheckTask,
    EvaluateTask,
    GradTask,
    GraphTask,
    InitTask,
    LossTask,
    OptimTask,
    ReduceTask,
    RolloutTask,
    SampleTask,
    ScoreTask,
    UpdateTask,
)
from gradserve.orchestration.program import Persist, Program, Step
from gradserve.wire.data import Row
from gradserve.wire.ops import graph_of

_FLOAT = 4
"""Bytes of a number in gradients, weights, moments and log-probs."""
_MOMENTS = 2
"""Of every trained number: AdamW's averages of the gradient and of its square."""


@dataclass(frozen=True)
class GraphWork:
    """FLOPs of one run of a graph and of its loss's gradient; bytes of its outputs and of its parameters."""

    flops: int
    backward_flops: int
    output_bytes: int
    parameter_bytes: int


Measure = Callable[[str, dict[str, tuple[int, ...]]], GraphWork | None]
"""A graph's digest and the shapes of inputs, by name (or of a symbol alone, as {"B": (n,)}) -> its work."""


@dataclass(frozen=True)
class Work:
    """Bytes of what a step makes, and its floating-point operations; None: sizes do not tell."""

    bytes: int | None = None
    flops: int | None = None


def work_of(program: Program, model: ModelSize | None, measure: Measure, transitions: int = 0) -> list[Work]:
    """The work of every step. ``model`` is of the run's base; ``transitions`` are those that an update learns from."""
    reckoner = _Reckoner(model, measure, transitions)
    return [reckoner.of(step) for step in program.steps]


@dataclass(frozen=True)
class _Reckoner:
    model: ModelSize | None
    measure: Measure
    transitions: int

    def of(self, step: Step) -> Work:
        if isinstance(step, Persist):
            kinds = 1 if len(step.digests) == 1 else 1 + _MOMENTS
            return Work(self._trained(kinds))
        match step.task:
            case GradTask() as task:
                return self._grad(task, takes_cotangents=bool(step.after))
            case ScoreTask() as task:
                return Work(_FLOAT * task.tokens, self._forward(task.tokens))
            case LossTask() as task:
                graph = self._loss(task.loss, task.rows)
                flops = None if graph is None else graph.flops + graph.backward_flops
                return Work(_FLOAT * _tokens(task.rows), flops)
            case ReduceTask():
                added = self._trained(1)
                return Work(added, None if added is None else (len(step.after) - 1) * (added // _FLOAT))
            case OptimTask() | InitTask() as task:
                return Work(self._trained(1 if isinstance(task, InitTask) else 1 + _MOMENTS))
            case GraphTask() as task:
                return self._graph(task)
            case RolloutTask() as task:
                return self._rollout(task)
            case UpdateTask() as task:
                return self._update(task)
            case CheckTask() | EvaluateTask() | SampleTask():
                return Work()

    def _trained(self, kinds: int) -> int | None:
        return None if self.model is None else _FLOAT * kinds * self.model.trained

    def _forward(self, tokens: int) -> int | None:
        if self.model is None:
            return None
        adapters = 0 if self.model.full else self.model.trained
        return 2 * tokens * (self.model.multiplied + adapters)

    def _grad(self, task: GradTask, takes_cotangents: bool) -> Work:
        scores = _FLOAT * task.tokens
        if self.model is None:
            return Work(None if task.backward else scores)
        forward = self._forward(task.tokens) or 0
        loss = None if takes_cotangents or graph_of(task.loss) is None else self._loss(task.loss, task.rows)
        extra = 0 if loss is None else loss.flops
        if not task.backward:
            return Work(scores, forward + extra)
        own = self.model.multiplied if self.model.full else self.model.trained
        backward = forward + 2 * task.tokens * own
        extra += 0 if loss is None else loss.backward_flops
        return Work(scores + _FLOAT * self.model.trained, forward + backward + extra)

    def _loss(self, name: str, rows: Sequence[Row]) -> GraphWork | None:
        digest = graph_of(name)
        assert digest is not None
        return self.measure(digest, {"B": (len(rows),), "T": (max(row.length for row in rows),)})

    def _graph(self, task: GraphTask) -> Work:
        graph = self.measure(task.graph, {name: array.shape for name, array in task.arrays.items()})
        if graph is None:
            return Work()
        if not task.backward:
            return Work(graph.output_bytes, graph.flops)
        return Work(graph.output_bytes + graph.parameter_bytes, graph.flops + graph.backward_flops)

    def _rollout(self, task: RolloutTask) -> Work:
        members = len(task.spec.members(task.group))
        graph = self.measure(task.graph, {"B": (members,)})
        return Work(None, None if graph is None else task.spec.steps * graph.flops)

    def _update(self, task: UpdateTask) -> Work:
        """Forward and, twice as much, backward of every transition in every epoch."""
        graph = self.measure(task.graph, {"B": (max(self.transitions, 1),)})
        if graph is None:
            return Work()
        flops = 3 * task.config.epochs * graph.flops if self.transitions else None
        return Work((1 + _MOMENTS) * graph.parameter_bytes, flops)


def _tokens(rows: Sequence[Row]) -> int:
    return int(np.sum([row.length for row in rows]))
