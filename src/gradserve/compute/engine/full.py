"""Full fine-tuning by the same Tasks as adapters: a run's weights are all parameters of its base.

A weights object holds every parameter once, float32, under its Hugging Face name, so that it *is* a model.safetensors.
The base in memory stays frozen; its parameters are exchanged for the time of a pass and nothing of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradserve.compute.combine import joined
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.engine.memory_plan import PLANS, Plan
from gradserve.compute.engine.train import check_gradient, evaluate, prepare
from gradserve.compute.tasks import GradTask
from gradserve.wire.results import ForwardBackwardResult

RECOMPUTE_TOKENS = 1024
"""Above so many tokens layers and head are computed twice: the memory model knows adapters' passes only."""

Between = Callable[[], None]
"""Called between two passes of a Task, when the base is itself again: others may use it then."""


def forward(base: Base, weights: Tensors, task: GradTask, between: Between) -> ForwardBackwardResult:
    """Log-probs and loss of all rows of a Task. Raises Invalid as train.prepare and train.evaluate."""
    results: list[ForwardBackwardResult] = []
    for rows in task.passes():
        if results:
            between()
        with torch.no_grad(), base.parameters.replaced(weights):
            job = prepare(base, weights, rows, task.loss, task.config)
            results.append(evaluate(base, job, _plan(job.packed.count))[1])
    return joined(results)


def forward_backward(
    base: Base, weights: Tensors, task: GradTask, gradient: Tensors, between: Between
) -> ForwardBackwardResult:
    """The same, and the loss's gradient, which is added to ``gradient`` (zeros, under the names of ``weights``).

    One pass after the other adds its share in place: a gradient is as large as the model, and more than one of them at
    a time would be memory for nothing.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    for name, leaf in leaves.items():
        leaf.grad = gradient[name]
    results: list[ForwardBackwardResult] = []
    for rows in task.passes():
        if results:
            between()
        job = prepare(base, leaves, rows, task.loss, task.config)
        plan = _plan(job.packed.count)
        with base.parameters.replaced(leaves), base.recomputing(plan.recompute):
            total, result = evaluate(base, job, plan)
            torch.autograd.backward(total)
        results.append(result)
    check_gradient(gradient)
    return joined(results)


def _plan(tokens: int) -> Plan:
    return PLANS[-1] if tokens > RECOMPUTE_TOKENS else PLANS[0]
