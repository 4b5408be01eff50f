"""Jobs -> log-probs, losses and gradients: the rows of all jobs of a pass are one packed row of N tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradserve.compute.engine import losses
from gradserve.compute.engine.attention import PackedLayout
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.finite import all_finite
from gradserve.compute.engine.kernels import Kernels
from gradserve.compute.engine.logprobs import log_softmax_
from gradserve.compute.engine.lora import Adapter, Route, Routing, Tensors, route
from gradserve.compute.engine.memory_plan import PLANS, Pass, Plan
from gradserve.compute.engine.packing import Packed, join, pack
from gradserve.wire.data import Array, Row
from gradserve.wire.errors import Invalid
from gradserve.wire.losses import LOSSES
from gradserve.wire.results import ForwardBackwardResult


@dataclass(frozen=True)
class Job:
    """One request of a pass: checked and packed, not yet computed."""

    weights: Tensors
    packed: Packed
    loss: str
    config: dict[str, float]


Computed = tuple[ForwardBackwardResult, Tensors | None]
"""The result for the client, and the gradient under the names of the weights (None after a forward alone)."""


def prepare(base: Base, weights: Tensors, rows: list[Row], loss: str, config: dict[str, float]) -> Job:
    """All that can be said about a request before it is computed. Raises Invalid."""
    job = Job(weights, pack(rows, base.device), loss, losses.settings(loss, config))
    _check_tokens(base, job.packed)
    _check_inputs(job)
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
        lps = torch.split(
            target_logprobs(base, routing, packed, plan.head_positions), [job.packed.count for job in jobs]
        )
        losses_found = [_loss(job, lp) for job, lp in zip(jobs, lps, strict=True)]
        if not backward:
            return [found if isinstance(found, Invalid) else (found.result, None) for found in losses_found]
        return _with_gradients(losses_found, list(lps), weights, half_target if base.dtype == torch.float16 else None)


def score(base: Base, weights: Tensors, rows: list[Row]) -> ForwardBackwardResult:
    """Log-probs of the rows' targets and their cross entropy, as a forward Task would give them. Raises Invalid."""
    (found,) = forward_backward(base, [prepare(base, weights, rows, "cross_entropy", {})], backward=False)
    if isinstance(found, Invalid):
        raise found
    return found[0]


def evaluate(base: Base, job: Job, plan: Plan) -> tuple[Tensor, ForwardBackwardResult]:
    """The loss of one job under the base's parameters as they are, without an adapter. Raises Invalid."""
    found = _loss(job, target_logprobs(base, [], job.packed, plan.head_positions))
    if isinstance(found, Invalid):
        raise found
    return found.total, found.result


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


def target_logprobs(base: Base, routing: Routing, packed: Packed, head_positions: int | None) -> Tensor:
    """Log-probs of the targets, float32 [N, K]; differentiable where the adapters' tensors ask for it."""
    filled = _filled(packed)
    hidden = base.hidden(filled.tokens, filled.positions, PackedLayout(filled.lengths, base.kernels))

    def head(start: int, part: Tensor, targets: Tensor) -> Tensor:
        with base.routed(_clip(routing, start, start + part.shape[0])):
            lp: Tensor = _TargetLogprobs.apply(base.logits(part), targets, base.kernels)  # type: ignore[no-untyped-call]
            return lp

    if head_positions is None or packed.count <= head_positions:
        return head(0, hidden, filled.targets)[: packed.count]
    starts = range(0, packed.count, head_positions)
    pieces = zip(starts, torch.split(hidden, head_positions), torch.split(packed.targets, head_positions), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([head(*piece) for piece in pieces])
    return torch.cat([checkpoint(head, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces])


MIN_ROWS = 16
"""With fewer rows a matrix product is computed by other kernels, with other last bits (measured: MKL, one thread)."""


def _filled(packed: Packed) -> Packed:
    """A pass of a few tokens gets a meaningless sequence beside them, so that a Task of a few tokens gives the same
    bits alone and among others. The rows of the fill belong to no job: no adapter, no loss, no gradient."""
    missing = MIN_ROWS - packed.count
    if missing <= 0:
        return packed
    zeros = packed.tokens.new_zeros(missing)
    width = packed.targets.shape[1]
    fill = Packed(
        zeros, torch.arange(missing, device=zeros.device), zeros[:, None].expand(-1, width), {}, [missing], []
    )
    return join([packed, fill])


class _TargetLogprobs(torch.autograd.Function):
    """Log-softmax and gather; overwrites the logits it is given, twice."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, kernels: Kernels) -> Tensor:
        """logits [M, V], targets [M, K] -> [M, K]"""
        logprobs = log_softmax_(logits)
        ctx.save_for_backward(logprobs, targets)
        ctx.kernels = kernels
        return logprobs.gather(1, targets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """d lp_k / d logits = onehot_k - softmax"""
        out, targets = ctx.saved_tensors
        ctx.kernels.exp_(out).mul_(-grad.sum(1, keepdim=True)).scatter_add_(1, targets, grad)
        return out, None, None


@dataclass(frozen=True)
class _Loss:
    total: Tensor
    result: ForwardBackwardResult


def _loss(job: Job, lp: Tensor) -> _Loss | Invalid:
    """The loss of a job from the log-probs [n, K'] of its rows; K' may be wider than its own K."""
    batch = _batch(job, lp[:, : job.packed.targets.shape[1]])
    terms = losses.FUNCTIONS[job.loss](batch)
    metrics = losses.metrics(job.loss, batch, terms)
    if not np.isfinite(metrics["loss:sum"]):
        return Invalid("non_finite", f"the loss is {metrics['loss:sum']}; nothing was accumulated.", fix=_CURE)
    return _Loss(terms.sum(), ForwardBackwardResult(_rows(job.packed, batch.lp), metrics))


def _with_gradients(
    found: list[_Loss | Invalid], lps: list[Tensor], leaves: list[Tensors], half_target: float | None
) -> list[Computed | Invalid]:
    """From the losses to the log-probs, and from these, all jobs together, to the weights."""
    sound = [part for part in zip(found, lps, leaves, strict=True) if isinstance(part[0], _Loss)]
    if not sound:
        return [loss for loss in found if isinstance(loss, Invalid)]
    totals, outputs = [loss.total for loss, _, _ in sound if isinstance(loss, _Loss)], [lp for _, lp, _ in sound]
    cotangents = torch.autograd.grad(totals, outputs, materialize_grads=True)
    scales = [_scale(cotangent, half_target) for cotangent in cotangents]
    inputs = [tensor for _, _, mine in sound for tensor in mine.values()]
    scaled = [cotangent * scale for cotangent, scale in zip(cotangents, scales, strict=True)]
    gradients = iter(torch.autograd.grad(outputs, inputs, scaled, materialize_grads=True))
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


def _scale(cotangent: Tensor, half_target: float | None) -> float:
    """A power of two by which a job's cotangents [n, K] are multiplied on their way through a float16 model."""
    if half_target is None:
        return 1.0
    largest = float(cotangent.abs().max())
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


def _clip(routing: Routing, start: int, stop: int) -> Routing:
    """The routing of the tokens start..stop, counted from start."""
    clipped = []
    for part in routing:
        assert isinstance(part.rows, slice)
        first, last = max(part.rows.start, start) - start, min(part.rows.stop, stop) - start
        if first < last:
            clipped.append(Route(part.adapter, slice(first, last)))
    return clipped


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


def _check_inputs(job: Job) -> None:
    if job.loss == "cross_entropy":
        return
    if job.packed.targets.shape[1] != 1:
        raise Invalid("bad_shape", f"{job.loss} takes one target per token", field="target_tokens")
    for name in LOSSES[job.loss].required:
        if name != "target_tokens" and name not in job.packed.inputs:
            raise Invalid("missing_input", f"the loss {job.loss} needs {name!r}", field=name, index=0)


def _batch(job: Job, lp: Tensor) -> losses.Batch:
    """The ratio losses have one target per token and work on [N]."""
    packed = job.packed
    if job.loss == "cross_entropy":
        return losses.Batch(lp, packed.inputs, job.config, packed.lengths)
    flat = {name: values[:, 0] for name, values in packed.inputs.items()}
    return losses.Batch(lp[:, 0], flat, job.config, packed.lengths)


def _rows(packed: Packed, lp: Tensor) -> list[Array]:
    """The log-probs of each row in the shape of its own targets."""
    values = lp.detach().view(packed.count, -1).cpu().numpy()
    parts = np.split(values, np.cumsum(packed.lengths)[:-1])
    return [
        Array.of(part[:, 0] if width is None else part[:, :width])
        for part, width in zip(parts, packed.widths, strict=True)
    ]
