"""Building blocks of the supported families with the derivatives written out.

Each gives the numbers of the module it stands for, but keeps fewer activations and makes fewer passes over them than
autograd would: on a CPU a small model spends as long between its matrix products as in them. The base is frozen, so
nothing here has a derivative by the base's own weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

Segment = tuple[slice, float]
"""Rows of a pass and the scale of the adapter that they go through."""


class RoutedLinear(torch.autograd.Function):
    """y = W x + c and, in the rows of each segment, + scale * B A x with that segment's own A [R, in], B [out, R].

    Each segment's gradient is computed from its own rows alone, by the same products as if it were the whole pass.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: list[Segment],
        *factors: Tensor,
    ) -> Tensor:
        """x [N, in] -> [N, out]; ``segments`` are (rows, scale), ``factors`` A and B of each in turn."""
        y = F.linear(x, weight, bias)
        reduced = []
        for (rows, scale), a, b in zip(segments, factors[::2], factors[1::2], strict=True):
            reduced.append(F.linear(x[rows], a))
            y[rows].addmm_(reduced[-1], b.t(), alpha=scale)
        ctx.save_for_backward(x, weight, *factors, *reduced)
        ctx.segments = segments  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """d/dx = W' g + scale A' B' g; d/dA = scale B' g x'; d/dB = scale g (A x)'."""
        x, weight, *rest = ctx.saved_tensors
        count = 2 * len(ctx.segments)
        factors, reduced = rest[:count], rest[count:]
        found: list[Tensor | None] = []
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        for (rows, scale), a, b, h in zip(ctx.segments, factors[::2], factors[1::2], reduced, strict=True):
            part = grad[rows]
            back = (part @ b).mul_(scale)
            found.append(back.t() @ x[rows])
            found.append((h.t() @ part).mul_(scale).t().contiguous())  # this way round it takes half the time
            if dx is not None:
                dx[rows].addmm_(back, a)
        return dx, None, None, None, *found


class EvenlyRoutedLinear(torch.autograd.Function):
    """RoutedLinear for E adjacent segments of n rows each whose adapters have one shape: the same products, batched.

    A fifth of the calls. Each segment's bits are those of RoutedLinear where ``even`` allows it.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: list[Segment],
        *factors: Tensor,
    ) -> Tensor:
        """As RoutedLinear's."""
        y = F.linear(x, weight, bias)
        a, b = torch.stack(factors[::2]), torch.stack(factors[1::2])  # [E, R, in], [E, out, R]
        reduced = torch.bmm(_stacked(x, segments), a.transpose(1, 2))
        _stacked(y, segments).baddbmm_(reduced, b.transpose(1, 2), alpha=segments[0][1])
        # The factors are others' memory, the stacks would be this pass's: they are made again.
        ctx.save_for_backward(x, weight, reduced, *factors)
        ctx.segments = segments  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """As RoutedLinear's."""
        x, weight, h, *factors = ctx.saved_tensors
        scale = ctx.segments[0][1]
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        part = _stacked(grad, ctx.segments)
        back = torch.bmm(part, torch.stack(factors[1::2])).mul_(scale)
        da = torch.bmm(back.transpose(1, 2), _stacked(x, ctx.segments))
        db = torch.bmm(h.transpose(1, 2), part).mul_(scale).transpose(1, 2).contiguous()
        if dx is not None:
            _stacked(dx, ctx.segments).baddbmm_(back, torch.stack(factors[::2]))
        return dx, None, None, None, *(factor for pair in zip(da, db, strict=True) for factor in pair)


EVEN_RANK = 8
"""From this rank on a batched product gives the bits of single ones (measured: MKL, one thread, 1 to 250 rows)."""


def even(segments: list[Segment], factors: list[Tensor]) -> bool:
    """Whether EvenlyRoutedLinear may take the place of RoutedLinear."""
    (first, scale), (a, b) = segments[0], factors[:2]
    count = first.stop - first.start
    return (
        len(segments) > 1
        and a.shape[0] >= EVEN_RANK
        and all(
            other == (slice(first.start + index * count, first.start + (index + 1) * count), scale)
            for index, other in enumerate(segments)
        )
        and all(factor.shape == a.shape for factor in factors[::2])
        and all(factor.shape == b.shape for factor in factors[1::2])
    )


def _stacked(x: Tensor, segments: list[Segment]) -> Tensor:
    """[N, d] -> [E, n, d], a view of the segments' rows."""
    return x[segments[0][0].start : segments[-1][0].stop].view(len(segments), -1, x.shape[1])


class _RmsNorm(torch.autograd.Function):
    """n = x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, arXiv:1910.07467), times a frozen weight."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """d/dx = s (w g - n mean(w g n)), with s the scale and n = s x."""
        x, weight, scale = ctx.saved_tensors
        g = grad * weight
        inner = (g * x).mean(-1, keepdim=True).mul_(scale.square())
        return g.addcmul_(x, inner, value=-1).mul_(scale), None, None


class _SiluTimes(torch.autograd.Function):
    """silu(gate) * up; both factors of the product are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dup = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), dup


def fuse(model: nn.Module) -> None:
    """Let the norms and the gated products of ``model`` (changed in place) be computed by the functions above.

    Where a norm's weight is itself trained, or the type is not float32, the model's own code runs.
    """
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            _fuse_norm(module)
        elif kind.endswith("MLP") and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
            _fuse_mlp(module)


def _fuse_norm(norm: Any) -> None:
    original = norm.forward

    def forward(x: Tensor) -> Tensor:
        if not _worth_it(x) or norm.weight.requires_grad:
            return original(x)  # type: ignore[no-any-return]
        out: Tensor = _RmsNorm.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
        return out

    norm.forward = forward


def _fuse_mlp(mlp: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        if torch.is_grad_enabled():
            product: Tensor = _SiluTimes.apply(gate, up)  # type: ignore[no-untyped-call]
        else:
            product = F.silu(gate, inplace=True).mul_(up)
        out: Tensor = mlp.down_proj(product)
        return out

    mlp.forward = forward


def _worth_it(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad and x.dtype == torch.float32
