"""The attention of a sampling pass: rows that decode one token each, and pieces of stems.

Letters as in kv: a pool's layer is [2, S, Hkv, T, D], a stem's [2, Hkv, P, D]; N tokens of the pass, n rows of a pool,
G queries of a key head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gradserve.compute.engine.arrange import Arrangement, Piece
from gradserve.compute.engine.attention import attend_causal
from gradserve.compute.engine.kv import Pool


class SamplingLayout:
    """One pass over ``pools``, whose rows decode the token at position ``cached``, and pieces, as ``arranged``."""

    def __init__(self, pools: list[Pool], arranged: Arrangement, device: torch.device) -> None:
        self._views = [_PoolView(pool, slots, device) for pool, slots in zip(pools, arranged.slots, strict=True)]
        self._pieces = [(piece, slice(at, at + piece.count)) for piece, at in arranged.pieces]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See attention.Layout. Writes the new keys and values where they belong."""
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
        for view in self._views:
            view.attend(layer, q, k, v, scale, window, out)
        for piece, own in self._pieces:
            out[own] = _attend_piece(piece, layer, q[:, own], k[:, own], v[:, own], scale, window)
        return out


def _attend_piece(
    piece: Piece, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
) -> Tensor:
    stem = piece.stem
    if stem.kv is not None:
        end = stem.done + piece.count
        kept_k, kept_v = stem.kv[layer]
        kept_k[:, stem.done : end] = k
        kept_v[:, stem.done : end] = v
        if stem.done:
            k, v = kept_k[:, :end], kept_v[:, :end]
    return attend_causal(q, k, v, scale, window)


class _PoolView:
    """One pool during one pass: masks and indices are the same in all layers.

    ``slots`` are the tokens of the pass by slot.
    """

    def __init__(self, pool: Pool, slots: list[int], device: torch.device) -> None:
        self._count = len(pool.rows)
        self._pool = pool
        self._tokens = _select(slots, device)
        positions = [row.cached for row in pool.rows]
        self._first, self._last = min(positions), max(positions)
        self._at = torch.tensor(positions, device=device)
        self._places = _places(pool, self._at)
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, out: Tensor
    ) -> None:
        """Attention of this pool's rows, from q [H, N, D], k and v [Hkv, N, D] into ``out`` [N, H, D]."""
        q, k, v = (_take(tensor.transpose(0, 1), self._tokens) for tensor in (q, k, v))
        keys, values = self._pool.data[layer]
        size = q.shape[-1]
        keys.view(-1, size).index_copy_(0, self._places, k.reshape(-1, size))
        values.view(-1, size).index_copy_(0, self._places, v.reshape(-1, size))
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        low, high = self._seen(window)
        n = self._count
        out[self._tokens] = F.scaled_dot_product_attention(
            q.reshape(n, k.shape[1], -1, size),
            keys[:n, :, low:high],
            values[:n, :, low:high],
            attn_mask=self._masks[window],
            scale=scale,
        ).reshape(q.shape)

    def _seen(self, window: int | None) -> tuple[int, int]:
        """The positions that at least one row can see."""
        return 0 if window is None else max(0, self._first - window + 1), self._last + 1

    def _mask(self, window: int | None) -> Tensor | None:
        """bool [n, 1, 1, seen]; None where all rows see all of it."""
        if self._first == self._last:
            return None
        seen = torch.arange(*self._seen(window), device=self._at.device)
        at = self._at[:, None]
        mask = seen <= at
        if window is not None:
            mask &= seen > at - window
        return mask[:, None, None]


def _select(slots: list[int], device: torch.device) -> slice | Tensor:
    """A slice where the tokens lie in slot order: that needs no copies."""
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, device=device)


def _take(tensor: Tensor, tokens: slice | Tensor) -> Tensor:
    return tensor[tokens] if isinstance(tokens, slice) else tensor.index_select(0, tokens)


def _places(pool: Pool, at: Tensor) -> Tensor:
    """Where the row in each slot writes position ``at`` [n]: int64 [n * Hkv] into a pool's [S * Hkv * T]."""
    heads = pool.data[0].shape[2]
    lines = torch.arange(len(pool.rows) * heads, device=at.device).view(-1, heads)
    return (lines * pool.length + at[:, None]).view(-1)
