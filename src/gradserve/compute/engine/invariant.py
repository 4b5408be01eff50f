"""Batch-invariant numerics: a row's bits do not depend on its batch, on Task cutting, on caches or on the worker.

Three rules make it so, in float32 on one CPU thread:

1. A matrix product is done in tiles of a fixed number of rows. A library picks a kernel, and with it the order of a
   sum, by shape; in tiles of one shape every row meets the same kernel. Tiles of several sizes are used where a check
   on this machine shows that they agree to the bit (:class:`Tiles`).
2. Attention is computed per query over key blocks of fixed size, in order, with an online softmax (Milakov and
   Gimelshein 2018, arXiv:1805.02867). A block that a query does not see adds exact zeros and rescales by exactly 1, so
   that it is irrelevant how many further keys or queries a call brings.
3. Elementwise functions (exp, silu, cos) run on multiples of 16 rows: the last few elements of an array would go
   through a scalar version that rounds differently.

Gradients need no more than this: a Task of this mode is one row (orchestration/lower.py), and what it sums over is its
own row. The idea of fixed tiles and split sizes: He et al. 2025, "Defeating Nondeterminism in LLM Inference".
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.engine.kernels import FAST, OneByOne, Sight, seen

ROWS = 16
"""Passes are filled up to a multiple; also the rows of an attention tile and the smallest product tile."""
KEYS = 64
"""Keys of one attention block."""
_LOWEST = torch.finfo(torch.float32).min


class BatchInvariant(OneByOne):
    """See kernels.Kernels and the module's docstring. One per worker; CPU, float32, one thread."""

    key_block = KEYS
    groups_freely = False

    def __init__(self) -> None:
        if torch.get_num_threads() != 1:
            raise ModelUnusable(
                'numerics = "batch_invariant" computes on one thread per worker: set worker_threads = 1 '
                "and start more workers instead"
            )
        self._tiles = Tiles()
        _check_attention()

    def pad(self, rows: int) -> int:
        """See Kernels."""
        return _up(rows, ROWS)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Kernels."""
        y: Tensor = _Linear.apply(x, _aligned(weight), self._tiles)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias

    def add_low_rank(self, y: Tensor, x: Tensor, rows: slice | Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        """See Kernels. Scaled and added in two exactly rounded steps: a fused one would depend on vector tails."""
        part = self.linear(self.linear(x[rows], a), b).mul(scale)
        if isinstance(rows, slice):
            y[rows] += part
        else:
            y.index_add_(0, rows, part)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See Kernels."""
        out: Tensor = _Causal.apply(q, k, v, scale, window)  # type: ignore[no-untyped-call]
        return out

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, sight: Sight, scale: float) -> Tensor:
        """See Kernels."""
        n, heads, group, size = q.shape
        tiles = _up(group, ROWS) // ROWS
        rows = F.pad(q * scale, (0, 0, 0, tiles * ROWS - group)).reshape(n * heads * tiles, ROWS, size)
        state = _Softmax(rows.shape, rows)
        for start, visible in sight.blocks:
            k, v = (_block(part, start).reshape(n * heads, KEYS, size) for part in (keys, values))
            if tiles > 1:
                k, v = k.repeat_interleave(tiles, 0), v.repeat_interleave(tiles, 0)
            state.add(rows, k, v, visible.repeat_interleave(heads * tiles, 0)[:, None])
        return state.result().view(n, heads, tiles * ROWS, size)[:, :, :group]

    def exp_(self, x: Tensor) -> Tensor:
        """See Kernels."""
        missing = -x.numel() % ROWS
        if not missing:
            return x.exp_()
        return x.copy_(F.pad(x.flatten(), (0, missing)).exp_()[: x.numel()].view_as(x))


# Products ------------------------------------------------------------------------------------------------------


class Tiles:
    """Which row counts give the same bits on this machine, found out per shape of weight at its first use."""

    _SIZES = (256, 64, 16)

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int, bool], tuple[int, ...]] = {}

    def product(self, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        """x [M, K] times weight [K, O] (``transposed``: weight is [O, K]) -> [M, O], tile by tile."""
        matrix = weight.t() if transposed else weight
        sizes = self._verified(matrix, transposed)
        rows = x.shape[0]
        whole = _up(rows, sizes[-1])
        x = F.pad(x, (0, 0, 0, whole - rows)).contiguous()
        y = x.new_empty(whole, matrix.shape[1])
        at = 0
        for size in sizes:
            while whole - at >= size:
                torch.mm(x[at : at + size], matrix, out=y[at : at + size])
                at += size
        return y if rows == whole else y[:rows].clone()  # autograd refuses in-place sums on a view made here

    def _verified(self, matrix: Tensor, transposed: bool) -> tuple[int, ...]:
        key = (matrix.shape[0], matrix.shape[1], transposed)
        if key not in self._sizes:
            self._sizes[key] = _agreeing(matrix.detach(), self._SIZES)
        return self._sizes[key]


def _agreeing(matrix: Tensor, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes, largest first, in which every row gets the bits it gets in tiles of 64, at any place of a tile."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(sizes), matrix.shape[0], generator=generator)
    want = torch.cat([torch.mm(part, matrix) for part in torch.split(x, 64)])
    for shift in (1, 7, 33):
        moved = torch.mm(torch.roll(x[:64], shift, 0), matrix)
        if not torch.equal(moved, torch.roll(want[:64], shift, 0)):
            raise ModelUnusable(
                f'numerics = "batch_invariant" is not possible on this machine: in a product of {tuple(matrix.shape)} '
                "a row's result depends on its place among 64 rows"
            )
    return tuple(
        size
        for size in sizes
        if torch.equal(torch.cat([torch.mm(part, matrix) for part in torch.split(x, size)]), want)
    )


class _Linear(torch.autograd.Function):
    """x W^T and its two derivatives, in tiles; dW sums over all rows of x, which are one Task's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tiles = tiles
        return tiles.product(x, weight, transposed=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        for_x = ctx.tiles.product(grad, weight, transposed=False) if ctx.needs_input_grad[0] else None
        # Copies: where a row of a larger array starts in memory must not matter.
        for_weight = torch.mm(grad.t().clone(), x.clone()) if ctx.needs_input_grad[1] else None
        return for_x, for_weight, None


def _aligned(weight: Tensor) -> Tensor:
    """On a 64-byte boundary, where fresh tensors lie; a mapped file puts them anywhere."""
    return weight if weight.data_ptr() % 64 == 0 else weight.clone()


# Attention -----------------------------------------------------------------------------------------------------


class _Softmax:
    """The running state of tiles of queries: maximum, normaliser and weighted values. Shapes [B, R, ...]."""

    def __init__(self, shape: torch.Size, like: Tensor) -> None:
        self.out = like.new_zeros(shape)
        self.top = like.new_full((*shape[:2], 1), _LOWEST)
        self.total = like.new_zeros((*shape[:2], 1))

    def add(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, tiles: slice = slice(None)) -> None:
        """Account for one block of keys: q [B', R, D], k and v [B', KEYS, D], visible bool [B', R or 1, KEYS].

        ``tiles`` says which of the state's tiles these are.
        """
        scores = torch.bmm(q, k.transpose(1, 2)).masked_fill_(~visible, -math.inf)
        before = self.top[tiles]
        top = torch.maximum(before, scores.amax(-1, keepdim=True))
        shares = scores.sub_(top).exp_()
        kept = (before - top).exp()
        self.top[tiles] = top
        self.total[tiles] = self.total[tiles] * kept + shares.sum(-1, keepdim=True)
        self.out[tiles] = self.out[tiles] * kept + torch.bmm(shares, v)

    def result(self) -> Tensor:
        return self.out / self.total


def _tiled_causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """See Kernels.causal. A tile is ROWS consecutive queries of one head."""
    heads, n, size = q.shape
    k, v = k.contiguous(), v.contiguous()
    kv_heads, m = k.shape[0], k.shape[1]
    group, count = heads // kv_heads, _up(n, ROWS) // ROWS
    begin = 0 if window is None else max(0, m - n - window + 1) // KEYS * KEYS
    at = m - n + torch.arange(count * ROWS)  # filling rows see all keys; nobody reads them
    rows = F.pad(q * scale, (0, 0, 0, count * ROWS - n)).view(kv_heads, group, count, ROWS, size)
    rows = rows.transpose(1, 2).reshape(kv_heads, count * group, ROWS, size)
    seats = at.clamp(max=m - 1).view(count, 1, ROWS).expand(count, group, ROWS).reshape(count * group, ROWS)
    out = []
    for head in range(kv_heads):
        state = _Softmax(rows[head].shape, rows[head])
        for start in range(begin, m, KEYS):
            first = max(0, (start - (m - n)) // ROWS) * group  # earlier tiles do not reach this block
            tiles = slice(first, None)
            visible = seen(start, KEYS, seats[tiles].reshape(-1), window).view(-1, ROWS, KEYS)
            keys, values = (_block(part[head], start).expand(visible.shape[0], KEYS, size) for part in (k, v))
            state.add(rows[head][tiles], keys, values, visible, tiles)
        out.append(state.result())
    whole = torch.stack(out).view(kv_heads, count, group, ROWS, size).transpose(2, 3)
    return whole.permute(1, 2, 0, 3, 4).reshape(count * ROWS, heads, size)[:n]


class _Causal(torch.autograd.Function):
    """Tiled forward; the backward differentiates torch's attention of the same sequence, which is alone in its call."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.rest = scale, window
        return _tiled_causal(q, k, v, scale, window)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale, window = ctx.rest
        with torch.enable_grad():
            q, k, v = leaves = [tensor.detach().clone().requires_grad_() for tensor in ctx.saved_tensors]
            out = FAST.causal(q, k, v, scale, window)
        return *torch.autograd.grad(out, leaves, grad), None, None


def _block(keys: Tensor, start: int) -> Tensor:
    """[..., KEYS, D] from ``start``; beyond the end zeros, which the mask hides."""
    part = keys[..., start : start + KEYS, :]
    return part if part.shape[-2] == KEYS else F.pad(part, (0, 0, 0, KEYS - part.shape[-2]))


def _check_attention() -> None:
    """Attention tiles must agree to the bit however many share a call; raises ModelUnusable where they do not."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3 * ROWS + 5, 32, generator=draw) for _ in range(3))
    whole = _tiled_causal(q, k, v, 0.2, None)
    for end in (1, ROWS, 2 * ROWS + 3):
        if not torch.equal(_tiled_causal(q[:, end - 1 : end], k[:, :end], v[:, :end], 0.2, None)[0], whole[end - 1]):
            raise ModelUnusable('numerics = "batch_invariant" is not possible here: attention depends on its batch')


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
