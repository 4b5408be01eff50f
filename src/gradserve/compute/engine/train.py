"""Jobs -> log-probs, losses and gradients: the rows of all jobs of a pass are one packed row of N tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from gradserve.compute.engine.base import Base
from gradserve.compute.engine.finite import all_finite
from gradserve.compute.engine.lora import Adapter, Tensors, route
from gradserve.compute.engine.memory_plan import PLANS, Pass, Plan
from gradserve.compute.engine.objectives import Objective, public_loss
from gradserve.compute.engine.packing import Packed, bare, join, pack
from gradserve.compute.engine.scores import Heads, Scores, Wanted, scores
from gradserve.wire.data import Array, Row
from gradserve.wire.errors import Invalid
from gradserve.wire.results import ForwardBackwardResult


@dataclass(frozen=True)
class Job:
    """One request of a pass: checked and packed, not yet computed."""

    weights: Tensors
    packed: Packed
    objective: Objective


Computed = tuple[ForwardBackwardResult, Tensors | None]
"""The result for the client, and the gradient under the names of the weights (None after a forward alone)."""


def prepare(base: Base, weights: Tensors, rows: list[Row], loss: str, config: dict[str, float]) -> Job:
    """All that can be said about a request with a public loss before it is computed. Raises Invalid."""
    objective = public_loss(loss, config)
    job = Job(weights, pack(rows, base.device), objective)
    _check_tokens(base, job.packed)
    objective.check(job.packed)
    return job


def prepare_for(base: Base, weights: Tensors, rows: list[Row], objective: Objective) -> Job:
    """The same with any other objective, which keeps what it needs of the rows itself. Raises Invalid."""
    job = Job(weights, pack(bare(rows), base.device), objective)
    _check_tokens(base, job.packed)
    return job


def forward_backward(base: Base, jobs: list[Job], backward: bool, plan: Plan = PLANS[0]) -> list[Computed | Invalid]:
    """One pass over the rows of all jobs; each job gets what it would get alone, in the order given.

    ``plan`` says what is computed twice to save memory.

    A job whose loss or gradient is not finite gets an Invalid and leaves the others as they are: no operation of a
    pass mixes rows of two sequences, and a broken loss takes no part in the backward pass. Where a float16 model
    overflowed on its way back, the job is computed again with smaller cotangents.
    """
    largest, *smaller = _HALF_TARGETS
    found = _pass(base, jobs, backward, plan, largest)
    if not backward or base.dtype != torch.float16:
        return found
    return [
        _again(base, job, plan, smaller) if isinstance(f, Invalid) else f for job, f in zip(jobs, found, strict=True)
    ]


def _again(base: Base, job: Job, plan: Plan, targets: list[float]) -> Computed | Invalid:
    for target in targets:
        (found,) = _pass(base, [job], True, plan, target)
        if not isinstance(found, Invalid):
            break
    return found


def _pass(base: Base, jobs: list[Job], backward: bool, plan: Plan, half_target: float) -> list[Computed | Invalid]:
    # Each job has leaves and a segment of its own, also where two have the same weights: their gradients must not be
    # mixed, and a product over more rows may be computed by another kernel, with other last bits.
    weights = [_leaves(job.weights) if backward else job.weights for job in jobs]
    packed = join([job.packed for job in jobs])
    segments = [(Adapter.of(own), job.packed.count) for own, job in zip(weights, jobs, strict=True)]
    routing = route(list(segments), base.device)
    # The routing must hold during the backward pass too: recomputed layers ask for it again.
    with (
        torch.set_grad_enabled(backward),
        base.routed(routing),
        base.recomputing(backward and plan.recompute),
    ):
        wanted = reduce(Wanted.union, (job.objective.wanted for job in jobs))
        heads = [(own, job.packed.count) for own, job in zip(weights, jobs, strict=True)]
        found = scores(base, routing, packed, plan.head_positions, wanted, heads)
        parts = found.split([job.packed.count for job in jobs])
        losses_found = [_loss(job, part) for job, part in zip(jobs, parts, strict=True)]
        if not backward:
            return [found if isinstance(found, Invalid) else (found.result, None) for found in losses_found]
        return _with_gradients(losses_found, parts, weights, half_target if base.dtype == torch.float16 else None)


def score(base: Base, weights: Tensors, rows: list[Row]) -> ForwardBackwardResult:
    """Log-probs of the rows' targets and their cross entropy, as a forward Task would give them. Raises Invalid."""
    (found,) = forward_backward(base, [prepare(base, weights, rows, "cross_entropy", {})], backward=False)
    if isinstance(found, Invalid):
        raise found
    return found[0]


def evaluate(base: Base, job: Job, plan: Plan) -> tuple[Tensor, ForwardBackwardResult]:
    """The loss of one job under the base's parameters as they are, without an adapter. Raises Invalid."""
    found = _loss(job, scores(base, [], job.packed, plan.head_positions, job.objective.wanted, _own_head(job)))
    if isinstance(found, Invalid):
        raise found
    return found.total, found.result


def score_job(base: Base, job: Job, plan: Plan) -> Scores:
    """What a job's objective reads, without a gradient."""
    routing = route([(Adapter.of(job.weights), job.packed.count)], base.device)
    with torch.no_grad(), base.routed(routing):
        return scores(base, routing, job.packed, plan.head_positions, job.objective.wanted, _own_head(job))


def _own_head(job: Job) -> Heads:
    return [(job.weights, job.packed.count)]


def check_loss(metrics: dict[str, float]) -> None:
    """Raises Invalid when the loss is not finite."""
    if not np.isfinite(metrics["loss:sum"]):
        raise Invalid("non_finite", f"the loss is {metrics['loss:sum']}; nothing was accumulated.", fix=_CURE)


def check_gradient(gradient: Tensors) -> None:
    """Raises Invalid when a number in it is not finite."""
    if not all_finite(gradient.values()):
        raise Invalid("non_finite", "the gradient is not finite; nothing was accumulated.", fix=_CURE)


def outline(jobs: list[Job], backward: bool) -> Pass:
    """What the memory model must know of a pass over these jobs."""
    factors = [(name, tensor) for job in jobs for name, tensor in job.weights.items()]
    return Pass(
        lengths=tuple(length for job in jobs for length in job.packed.lengths),
        targets=max(job.packed.targets.shape[1] for job in jobs),
        rank=max((min(tensor.shape, default=0) for _, tensor in factors), default=0),
        adapter_values=sum(tensor.numel() for _, tensor in factors),
        head_values=sum(tensor.numel() for name, tensor in factors if ".lm_head." in name),
        backward=backward,
    )


@dataclass(frozen=True)
class _Loss:
    total: Tensor
    result: ForwardBackwardResult


def _loss(job: Job, scores: Scores) -> _Loss | Invalid:
    """The loss of a job from the scores of its rows; their log-probs may be wider than its own K."""
    scores = scores.narrow(job.packed.targets.shape[1])
    try:
        total, metrics = job.objective(job.packed, scores)
        check_loss(metrics)
    except Invalid as fault:
        return fault
    return _Loss(total, ForwardBackwardResult(rows_of(job.packed, scores.logprobs), metrics))


def _with_gradients(
    found: list[_Loss | Invalid], scores: list[Scores], leaves: list[Tensors], half_target: float | None
) -> list[Computed | Invalid]:
    """From the losses to the scores, and from these, all jobs together, to the weights."""
    sound = [part for part in zip(found, scores, leaves, strict=True) if isinstance(part[0], _Loss)]
    if not sound:
        return [loss for loss in found if isinstance(loss, Invalid)]
    totals = [loss.total for loss, _, _ in sound if isinstance(loss, _Loss)]
    outputs = [list(mine.named().values()) for _, mine, _ in sound]
    flat = [output for mine in outputs for output in mine]
    cotangents = iter(torch.autograd.grad(totals, flat, materialize_grads=True))
    grouped = [[next(cotangents) for _ in mine] for mine in outputs]
    scales = [_scale(mine, half_target) for mine in grouped]
    inputs = [tensor for _, _, mine in sound for tensor in mine.values()]
    scaled = [cotangent * scale for mine, scale in zip(grouped, scales, strict=True) for cotangent in mine]
    gradients = iter(torch.autograd.grad(flat, inputs, scaled, materialize_grads=True))
    unscale = iter(scales)
    return [
        loss if isinstance(loss, Invalid) else _checked(loss, _own(mine, gradients, next(unscale)))
        for loss, mine in zip(found, leaves, strict=True)
    ]


def _own(leaves: Tensors, gradients: Iterator[Tensor], scale: float) -> Tensors:
    return {name: next(gradients) / scale if scale != 1 else next(gradients) for name in leaves}


_HALF_TARGETS = (64.0, 1.0, 2.0**-8)
"""How large the largest cotangent of a log-prob enters a float16 model, and what is tried next when that overflows: far
from 65504, its largest number, and as far as that allows from 6e-8, its smallest."""


def _scale(cotangents: list[Tensor], half_target: float | None) -> float:
    """A power of two by which a job's cotangents are multiplied on their way through a float16 model."""
    if half_target is None:
        return 1.0
    largest = max(float(cotangent.abs().max()) for cotangent in cotangents)
    if not 0 < largest < float("inf"):
        return 1.0
    return 2.0 ** math.floor(math.log2(half_target / largest))


def _checked(loss: _Loss, gradient: Tensors) -> Computed | Invalid:
    try:
        check_gradient(gradient)
    except Invalid as fault:
        return fault
    return loss.result, gradient


_CURE = "Look for extreme advantages, weights or log-probs, or lower the learning rate."


def _leaves(weights: Tensors) -> Tensors:
    return {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}


def _check_tokens(base: Base, packed: Packed) -> None:
    longest = max(packed.lengths)
    if longest > base.context:
        raise Invalid(
            "too_long",
            f"a row has {longest} tokens; the context is {base.context}",
            index=packed.lengths.index(longest),
        )
    for field, ids in (("model_input", packed.tokens), ("target_tokens", packed.targets)):
        if int(ids.min()) < 0 or int(ids.max()) >= base.vocab:
            raise Invalid("unknown_token", f"{field} has ids outside 0..{base.vocab - 1}", field=field)


def rows_of(packed: Packed, lp: Tensor) -> list[Array]:
    """The log-probs of each row in the shape of its own targets."""
    values = lp.detach().view(packed.count, -1).cpu().numpy()
    parts = np.split(values, np.cumsum(packed.lengths)[:-1])
    return [
        Array.of(part[:, 0] if width is None else part[:, :width])
        for part, width in zip(parts, packed.widths, strict=True)
    ]
