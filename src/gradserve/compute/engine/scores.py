"""What a loss may see of a forward pass: log-probs of the targets and, when asked for, more of each position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradserve.compute.engine.attention import PackedLayout
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.kernels import Kernels
from gradserve.compute.engine.logprobs import log_softmax_
from gradserve.compute.engine.lora import VALUE_HEAD, Route, Routing, Tensors
from gradserve.compute.engine.packing import Packed, join


class Wanted(NamedTuple):
    """What is computed beside the targets' log-probs. ``topk`` is how many of the best log-probs of each position."""

    entropy: bool = False
    topk: int = 0
    hidden: bool = False
    values: bool = False

    def union(self, other: Wanted) -> Wanted:
        """What serves both."""
        return Wanted(
            self.entropy or other.entropy,
            max(self.topk, other.topk),
            self.hidden or other.hidden,
            self.values or other.values,
        )


@dataclass(frozen=True)
class Scores:
    """float32, one row per packed token; N tokens, K targets, d the model's width.

    ``logprobs`` [N, K] of the targets; ``entropy`` [N] of the next token's distribution, nats; ``topk`` [N, k] the best
    log-probs in descending order; ``hidden`` [N, d] what the head reads; ``values`` [N] of the runs' own value heads.
    Differentiable in a training pass.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    topk: Tensor | None = None
    hidden: Tensor | None = None
    values: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        found = {name: getattr(self, name) for name in ("logprobs", "entropy", "topk", "hidden", "values")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def split(self, counts: list[int]) -> list[Scores]:
        """The scores of each part of the pass, so many tokens each."""
        parts = {name: torch.split(tensor, counts) for name, tensor in self.named().items()}
        return [Scores(**{name: split[index] for name, split in parts.items()}) for index in range(len(counts))]

    def narrow(self, targets: int) -> Scores:
        """Without the columns of ``logprobs`` that only others of the pass have."""
        return replace(self, logprobs=self.logprobs[:, :targets])


Heads = list[tuple[Tensors, int]]
"""The weights of each part of a pass and its number of tokens, in order; they may hold a value head."""


def scores(
    base: Base, routing: Routing, packed: Packed, head_positions: int | None, wanted: Wanted, heads: Heads
) -> Scores:
    """One forward pass. Differentiable where the tensors of adapters and value heads ask for it.

    ``head_positions`` tells into pieces of how many positions the head is cut, each computed twice; None: one piece.
    """
    filled = _filled(packed)
    hidden = base.hidden(filled.tokens, filled.positions, PackedLayout(filled.lengths, base.kernels))
    head = partial(_head, base, routing, wanted)
    if head_positions is None or packed.count <= head_positions:
        found = head(0, hidden, filled.targets)
        pieces = [tuple(tensor[: packed.count] for tensor in found)]
    else:
        starts = range(0, packed.count, head_positions)
        parts = zip(
            starts, torch.split(hidden, head_positions), torch.split(packed.targets, head_positions), strict=True
        )
        pieces = [_twice(head, *part) if torch.is_grad_enabled() else head(*part) for part in parts]
    tensors = iter([torch.cat(column) if len(column) > 1 else column[0] for column in zip(*pieces, strict=True)])
    return Scores(
        logprobs=next(tensors),
        entropy=next(tensors) if wanted.entropy else None,
        topk=next(tensors) if wanted.topk else None,
        # A view of its own: what the loss takes from the states directly is not what it takes through the values.
        hidden=hidden[: packed.count].float().view(packed.count, -1) if wanted.hidden else None,
        values=_values(hidden[: packed.count].float(), heads) if wanted.values else None,
    )


def _values(hidden: Tensor, heads: Heads) -> Tensor:
    """[N, d] -> [N]: each part by its own head, 0 where it has none."""
    parts = torch.split(hidden, [count for _, count in heads])
    return torch.cat([_value(part, weights) for part, (weights, _) in zip(parts, heads, strict=True)])


def _value(hidden: Tensor, weights: Tensors) -> Tensor:
    weight = weights.get(f"{VALUE_HEAD}weight")
    if weight is None:
        return hidden.new_zeros(len(hidden))
    return (hidden @ weight[0]) + weights[f"{VALUE_HEAD}bias"]


def _twice(head: Any, start: int, part: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = checkpoint(head, start, part, targets, use_reentrant=False, preserve_rng_state=False)
    return found


def _head(
    base: Base, routing: Routing, wanted: Wanted, start: int, part: Tensor, targets: Tensor
) -> tuple[Tensor, ...]:
    with base.routed(_clip(routing, start, start + part.shape[0])):
        logits = base.logits(part)
        if not wanted.entropy and not wanted.topk:
            return (_TargetLogprobs.apply(logits, targets, base.kernels),)  # type: ignore[no-untyped-call]
        found: tuple[Tensor, ...] = _MoreOfIt.apply(  # type: ignore[no-untyped-call]
            logits, targets, wanted.entropy, wanted.topk, base.kernels
        )
        return found


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


class _MoreOfIt(torch.autograd.Function):
    """As _TargetLogprobs, with the entropy H = -sum p log p and the best k log-probs; overwrites the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, entropy: bool, topk: int, kernels: Kernels
    ) -> tuple[Tensor, ...]:
        """logits [M, V], targets [M, K] -> [M, K], then [M] if ``entropy``, then [M, topk] if ``topk``"""
        logprobs = log_softmax_(logits)
        found = [logprobs.gather(1, targets)]
        h = None
        if entropy:
            h = -(kernels.exp_(logprobs.clone()) * logprobs).nan_to_num_(0.0).sum(1)
            found.append(h)
        best = None
        if topk:
            values, best = logprobs.topk(topk, dim=1)
            found.append(values)
        ctx.save_for_backward(logprobs, targets, h, best)
        ctx.kernels = kernels
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """d lp_k / d logits = onehot_k - softmax; dH / d logits = -softmax (log softmax + H)"""
        logprobs, targets, h, best = ctx.saved_tensors
        rest: Iterator[Tensor] = iter(grads)
        grad = next(rest)
        total = grad.sum(1, keepdim=True)
        from_h = None if h is None else next(rest)[:, None]
        from_best = None if best is None else next(rest)
        if from_best is not None:
            total = total + from_best.sum(1, keepdim=True)
        scale = -total
        if from_h is not None:
            scale = scale - from_h * (logprobs + h[:, None])
        out = (
            ctx.kernels.exp_(logprobs).mul_(scale).nan_to_num_(0.0)
            if from_h is not None
            else (ctx.kernels.exp_(logprobs).mul_(scale))
        )
        out.scatter_add_(1, targets, grad)
        if from_best is not None:
            out.scatter_add_(1, best, from_best)
        return out, None, None, None, None


def _clip(routing: Routing, start: int, stop: int) -> Routing:
    """The routing of the tokens start..stop, counted from start."""
    clipped = []
    for part in routing:
        assert isinstance(part.rows, slice)
        first, last = max(part.rows.start, start) - start, min(part.rows.stop, stop) - start
        if first < last:
            clipped.append(Route(part.adapter, slice(first, last)))
    return clipped
