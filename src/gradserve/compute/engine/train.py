"""Jobs -> log-probs, losses and gradients: the rows of all jobs of a pass are one packed row of N tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from gradserve.compute.engine import losses
from gradserve.compute.engine.attention import PackedLayout
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.finite import all_finite
from gradserve.compute.engine.lora import Adapter, Route, Routing, Tensors, route
from gradserve.compute.engine.memory_plan import LOGITS_AT_ONCE, PLANS, Pass, Plan
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
    pass mixes rows of two sequences, and a broken loss takes no part in the backward pass.
    """
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
        return _with_gradients(losses_found, weights)


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
    hidden = base.hidden(filled.tokens, filled.positions, PackedLayout(filled.lengths))

    def head(start: int, part: Tensor, targets: Tensor) -> Tensor:
        with base.routed(_clip(routing, start, start + part.shape[0])):
            lp: Tensor = _TargetLogprobs.apply(base.logits(part), targets)  # type: ignore[no-untyped-call]
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
    """log_softmax and gather, in blocks that stay in the processor's cache; overwrites the logits it is given."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [M, V], targets [M, K] -> [M, K]"""
        rows = max(1, LOGITS_AT_ONCE // logits.shape[1])
        for block in torch.split(logits, rows):
            block.copy_(torch.log_softmax(block, -1))
        ctx.save_for_backward(logits, targets)
        return logits.gather(1, targets)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        """d lp_k / d logits = onehot_k - softmax"""
        out, targets = ctx.saved_tensors  # type: ignore[attr-defined]
        out.exp_().mul_(-grad.sum(1, keepdim=True)).scatter_add_(1, targets, grad)
        return out, None


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


def _with_gradients(found: list[_Loss | Invalid], leaves: list[Tensors]) -> list[Computed | Invalid]:
    sound = [(loss, mine) for loss, mine in zip(found, leaves, strict=True) if isinstance(loss, _Loss)]
    if not sound:
        return [loss for loss in found if isinstance(loss, Invalid)]
    inputs = [tensor for _, mine in sound for tensor in mine.values()]
    gradients = iter(torch.autograd.grad([loss.total for loss, _ in sound], inputs, materialize_grads=True))
    return [
        loss if isinstance(loss, Invalid) else _checked(loss, {name: next(gradients) for name in mine})
        for loss, mine in zip(found, leaves, strict=True)
    ]


def _checked(loss: _Loss, gradient: Tensors) -> Computed | Invalid:
    if not all_finite(gradient.values()):
        return Invalid("non_finite", "the gradient is not finite; nothing was accumulated.", fix=_CURE)
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
