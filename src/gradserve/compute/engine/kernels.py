"""The arithmetic that decides a result's bits: matrix products and attention. One object per base and numerics mode.

``fast`` calls torch's kernels as they come: a row's last bits then depend on how many rows share its pass, because
the library chooses a kernel by shape. ``batch_invariant`` (invariant.py) gives a row the same bits in any batch.
Letters: N tokens, n rows of a pool, H query heads, Hkv key heads, G = H / Hkv, D head size, T and m key positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Numerics = Literal["fast", "batch_invariant"]


class Sight:
    """Which cached keys the newest token of each row sees; the same in all layers of a pass, so masks are kept.

    ``at`` int64 [n] are the rows' positions. Visible positions lie in ``first`` .. ``stop`` - 1; both are multiples of
    ``block``.
    """

    def __init__(self, positions: list[int], window: int | None, device: torch.device, block: int = 1) -> None:
        self.at = torch.tensor(positions, device=device)
        low, high = min(positions), max(positions)
        self.first = 0 if window is None else max(0, low - window + 1) // block * block
        self.stop = (high // block + 1) * block
        self._level = window is None and low == high
        self._window = window
        self._block = block

    @cached_property
    def mask(self) -> Tensor | None:
        """bool [n, 1, 1, stop - first]; None where all rows see all of it."""
        if self._level:
            return None
        return seen(self.first, self.stop - self.first, self.at, self._window)[:, None, None]

    @cached_property
    def blocks(self) -> list[tuple[int, Tensor]]:
        """(start relative to ``first``, bool [n, block]) of each block of positions."""
        starts = range(self.first, self.stop, self._block)
        return [(start - self.first, seen(start, self._block, self.at, self._window)) for start in starts]


class Kernels(Protocol):
    """Every product and attention of a pass goes through these."""

    key_block: int
    """Cached keys are read in blocks of so many."""
    groups_freely: bool
    """Whether products may be grouped and fused as is fastest (stacked.py, fused.py), which moves last bits."""

    def pad(self, rows: int) -> int:
        """How many rows a pass of ``rows`` must be filled up to."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [N, in], weight [out, in] -> [N, out]; differentiable in x and weight."""
        ...

    def add_low_rank(self, y: Tensor, x: Tensor, rows: slice | Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        """y[rows] += scale * B A x[rows], in place. x [N, in], y [N, out], a [R, in], b [out, R]."""
        ...

    def causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [H, n, D], k and v [Hkv, m, D] -> [n, H, D]: the queries are the last n of m positions of one sequence.

        ``window``: a token sees itself and window - 1 before. Differentiable.
        """
        ...

    def packed(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None) -> Tensor:
        """Whole sequences of ``lengths`` one after another: q [H, N, D], k and v [Hkv, N, D] -> [N, H, D].

        Each is causal and blind to the others. Differentiable.
        """
        ...

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, sight: Sight, scale: float) -> Tensor:
        """One query position per sequence: q [n, Hkv, G, D], keys and values [n, Hkv, T, D] -> [n, Hkv, G, D]."""
        ...

    def exp_(self, x: Tensor) -> Tensor:
        """e to the power of each element, in place. x [M, V]"""
        ...


class OneByOne(ABC):
    """Attention over packed rows as one call per sequence, for kernels that have nothing better."""

    @abstractmethod
    def causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See Kernels."""

    def packed(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None) -> Tensor:
        """See Kernels."""
        qs, ks, vs = (torch.split(tensor, lengths, dim=1) for tensor in (q, k, v))
        rows = zip(qs, ks, vs, strict=True)
        return torch.cat([self.causal(*row, scale, window) for row in rows])


class Fast(OneByOne):
    """torch's kernels as they come."""

    key_block = 1
    groups_freely = True

    def pad(self, rows: int) -> int:
        """See Kernels."""
        return rows

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Kernels."""
        return F.linear(x, weight, bias)

    def add_low_rank(self, y: Tensor, x: Tensor, rows: slice | Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        """See Kernels. A base in half precision meets its float32 adapter in float32 (as in PEFT), rounded once."""
        if y.dtype != a.dtype:
            part = F.linear(F.linear(x[rows].to(a.dtype), a), b)
            y[rows] = torch.add(y[rows], part, alpha=scale).to(y.dtype)
        elif rows == slice(0, x.shape[0]):
            y.addmm_(F.linear(x, a), b.t(), alpha=scale)
        elif isinstance(rows, slice):
            y[rows].addmm_(F.linear(x[rows], a), b.t(), alpha=scale)
        else:
            y.index_add_(0, rows, F.linear(F.linear(x[rows], a), b), alpha=scale)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See Kernels."""
        n, m = q.shape[1], k.shape[1]
        if window is not None and m > window:
            return torch.cat([_in_window(q, k, v, scale, window, at) for at in range(0, n, _BLOCK)])
        return _attend(q, k, v, scale, None if n == m else band(n, m, None, q.device))

    def packed(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None) -> Tensor:
        """See Kernels. Sequences of one length are one call, which gives each the bits of a call of its own."""
        length = lengths[0]
        if len(lengths) == 1 or set(lengths) != {length} or (window is not None and length > window):
            return super().packed(q, k, v, lengths, scale, window)
        q, k, v = (x.view(x.shape[0], -1, length, x.shape[2]).transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, sight: Sight, scale: float) -> Tensor:
        """See Kernels. The G queries of a key head are its query positions."""
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=sight.mask, scale=scale)

    def exp_(self, x: Tensor) -> Tensor:
        """See Kernels."""
        return x.exp_()


FAST = Fast()

_BLOCK = 512
"""Queries taken together under a window: each block meets the keys it can see, not all of them."""


def _in_window(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, at: int) -> Tensor:
    n, m = q.shape[1], k.shape[1]
    end = min(at + _BLOCK, n)
    last = m - n + end
    first = max(0, m - n + at - window + 1)
    mask = band(end - at, last - first, window, q.device)
    return _attend(q[:, at:end], k[:, first:last], v[:, first:last], scale, mask)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Causal where there is no mask."""
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def band(n: int, m: int, window: int | None, device: torch.device) -> Tensor:
    """bool [n, m]: query i is key m - n + i and sees itself and, at most, the window - 1 keys before."""
    return seen(0, m, torch.arange(m - n, m, device=device), window)


def seen(first: int, count: int, at: Tensor, window: int | None) -> Tensor:
    """bool [n, count]: which of the positions first .. first + count - 1 the query at position ``at[i]`` sees."""
    positions = torch.arange(first, first + count, device=at.device)
    mask = positions <= at[:, None]
    return mask if window is None else mask & (positions > at[:, None] - window)
