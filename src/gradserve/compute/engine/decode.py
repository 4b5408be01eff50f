"""The attention of a sampling pass: rows that decode one token each, then pieces of stems.

Letters as in kv: a pool's layer is [2, S, Hkv, T, D], a stem's [2, Hkv, P, D]; N tokens of the pass, n rows of a pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradserve.compute.engine.attention import attend_causal
from gradserve.compute.engine.kv import Pool
from gradserve.compute.engine.sequences import Stem


@dataclass(frozen=True)
class Piece:
    """The next ``count`` tokens of a stem."""

    stem: Stem
    count: int


class SamplingLayout:
    """One pass over ``pools`` (every row decodes the token at position ``cached``) and ``pieces``, in this order."""

    def __init__(self, pools: list[Pool], pieces: list[Piece], device: torch.device) -> None:
        self._decoding = [_PoolView(pool, device) for pool in pools]
        self._pieces = pieces

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See attention.Layout. Writes the new keys and values where they belong."""
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
        at = 0
        for view in self._decoding:
            end = at + view.count
            out[at:end] = view.attend(layer, q[:, at:end], k[:, at:end], v[:, at:end], scale, window)
            at = end
        for piece in self._pieces:
            end = at + piece.count
            out[at:end] = _attend_piece(piece, layer, q[:, at:end], k[:, at:end], v[:, at:end], scale, window)
            at = end
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
    """One pool during one pass: masks and indices are the same in all layers."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self.count = len(pool.rows)
        self._pool = pool
        positions = [row.cached for row in pool.rows]
        self._first, self._last = min(positions), max(positions)
        self._at = torch.tensor(positions, device=device)
        self._rows = torch.arange(self.count, device=device)
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [H, n, D], k and v [Hkv, n, D] -> [n, H, D]; the G queries of a key head are its query positions."""
        heads, n, size = q.shape
        keys, values = self._pool.data[layer]
        keys[self._rows, :, self._at] = k.transpose(0, 1)
        values[self._rows, :, self._at] = v.transpose(0, 1)
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        low, high = self._seen(window)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).reshape(n, k.shape[0], -1, size),
            keys[:n, :, low:high],
            values[:n, :, low:high],
            attn_mask=self._masks[window],
            scale=scale,
        )
        return out.reshape(n, heads, size)

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
