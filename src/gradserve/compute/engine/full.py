"""Full fine-tuning by the same Tasks as adapters: a run's weights are all parameters of its base.

A weights object holds every parameter once, float32, under its Hugging Face name, so that it *is* a model.safetensors.
The base in memory stays frozen; its parameters are exchanged for the time of a pass and nothing of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradserve.compute.combine import joined
from gradserve.compute.engine import staged
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.graph_store import BoundedGraph
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.engine.memory_plan import PLANS, Plan
from gradserve.compute.engine.objectives import Cotangents, GraphLoss
from gradserve.compute.engine.scores import scores
from gradserve.compute.engine.train import Job, check_gradient, check_loss, evaluate, prepare, prepare_for, rows_of
from gradserve.compute.tasks import GradTask
from gradserve.wire.data import Array, Row
from gradserve.wire.results import ForwardBackwardResult

RECOMPUTE_TOKENS = 1024
"""Above so many tokens layers and head are computed twice: the memory model knows adapters' passes only."""

Between = Callable[[], None]
"""Called between two passes of a Task, when the base is itself again: others may use it then."""


def forward(
    base: Base, weights: Tensors, task: GradTask, graph: BoundedGraph | None, between: Between
) -> ForwardBackwardResult:
    """Log-probs and loss of all rows of a Task. Raises Invalid as train.prepare and train.evaluate.

    A ``graph`` that must see all rows sees them when all are scored; so its loss does not depend on the passes.
    """
    if graph is not None and graph.graph.over == "batch":
        return _scored(base, weights, task, graph, between)[1]
    results: list[ForwardBackwardResult] = []
    for rows in task.passes():
        if results:
            between()
        with torch.no_grad(), base.parameters.replaced(weights):
            job = _job(base, weights, rows, task, graph)
            results.append(evaluate(base, job, _plan(job.packed.count))[1])
    return joined(results)


def forward_backward(
    base: Base, weights: Tensors, task: GradTask, graph: BoundedGraph | None, gradient: Tensors, between: Between
) -> ForwardBackwardResult:
    """The same, and the loss's gradient, which is added to ``gradient`` (zeros, under the names of ``weights``).

    One pass after the other adds its share in place: a gradient is as large as the model, and more than one of them at
    a time would be memory for nothing.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    for name, leaf in leaves.items():
        leaf.grad = gradient[name]
    whole: list[Cotangents] | None = None
    result: ForwardBackwardResult | None = None
    if graph is not None and graph.graph.over == "batch" and len(task.passes()) > 1:
        whole, result = _scored(base, weights, task, graph, between)
    results: list[ForwardBackwardResult] = []
    for index, rows in enumerate(task.passes()):
        if index or whole is not None:
            between()
        job = _job(base, leaves, rows, task, graph) if whole is None else prepare_for(base, leaves, rows, whole[index])
        plan = _plan(job.packed.count)
        with base.parameters.replaced(leaves), base.recomputing(plan.recompute):
            total, found = evaluate(base, job, plan)
            torch.autograd.backward(total)
        results.append(found)
    check_gradient(gradient)
    return result or joined(results)


def _scored(
    base: Base, weights: Tensors, task: GradTask, graph: BoundedGraph, between: Between
) -> tuple[list[Cotangents], ForwardBackwardResult]:
    """The loss over all passes, and its cotangents for each."""
    passes = task.passes()
    parts: list[Tensors] = []
    logprobs: list[Array] = []
    for rows in passes:
        if parts:
            between()
        with torch.no_grad(), base.parameters.replaced(weights):
            job = prepare_for(base, weights, rows, GraphLoss(graph, rows, base.device))
            found = scores(base, [], job.packed, _plan(job.packed.count).head_positions, job.objective.wanted, [])
        parts.append(found.named())
        logprobs += rows_of(job.packed, found.logprobs)
    given, metrics = staged.cotangents(graph, task.rows, parts, tuple(len(rows) for rows in passes))
    check_loss(metrics)
    return [Cotangents(part) for part in given], ForwardBackwardResult(logprobs, metrics)


def _job(base: Base, weights: Tensors, rows: list[Row], task: GradTask, graph: BoundedGraph | None) -> Job:
    if graph is None:
        return prepare(base, weights, rows, task.loss, task.config)
    return prepare_for(base, weights, rows, GraphLoss(graph, rows, base.device))


def _plan(tokens: int) -> Plan:
    return PLANS[-1] if tokens > RECOMPUTE_TOKENS else PLANS[0]
