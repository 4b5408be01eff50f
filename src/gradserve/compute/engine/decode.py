"""The attention of a sampling pass: rows that decode one token each, then pieces of stems.

Letters as in kv: a pool's layer is [2, S, Hkv, T, D], a stem's [2, Hkv, P, D]; N tokens of the pass, n rows of a pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradserve.compute.engine.kernels import Kernels, Sight
from gradserve.compute.engine.kv import Pool
from gradserve.compute.engine.sequences import Stem


@dataclass(frozen=True)
class Piece:
    """The next ``count`` tokens of a stem."""

    stem: Stem
    count: int


class SamplingLayout:
    """One pass over ``pools`` (every row decodes the token at position ``cached``) and ``pieces``, in this order."""

    def __init__(self, pools: list[Pool], pieces: list[Piece], device: torch.device, kernels: Kernels) -> None:
        self._decoding = [_PoolView(pool, device, kernels) for pool in pools]
        self._pieces = pieces
        self._kernels = kernels

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
            keys, values = _extend(piece, layer, k[:, at:end], v[:, at:end])
            out[at:end] = self._kernels.causal(q[:, at:end], keys, values, scale, window)
            at = end
        return out


def _extend(piece: Piece, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the piece's keys and values where something will follow; returns those of the stem so far."""
    stem = piece.stem
    if stem.kv is None:
        return k, v
    end = stem.done + piece.count
    kept_k, kept_v = stem.kv[layer]
    kept_k[:, stem.done : end] = k
    kept_v[:, stem.done : end] = v
    return (kept_k[:, :end], kept_v[:, :end]) if stem.done else (k, v)


class _PoolView:
    """One pool during one pass: masks and indices are the same in all layers."""

    def __init__(self, pool: Pool, device: torch.device, kernels: Kernels) -> None:
        self.count = len(pool.rows)
        self._pool = pool
        self._kernels = kernels
        self._positions = [row.cached for row in pool.rows]
        self._at = torch.tensor(self._positions, device=device)
        self._rows = torch.arange(self.count, device=device)
        self._sights: dict[int | None, Sight] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [H, n, D], k and v [Hkv, n, D] -> [n, H, D]."""
        heads, n, size = q.shape
        keys, values = self._pool.data[layer]
        keys[self._rows, :, self._at] = k.transpose(0, 1)
        values[self._rows, :, self._at] = v.transpose(0, 1)
        if window not in self._sights:
            self._sights[window] = Sight(self._positions, window, self._at.device, self._kernels.key_block)
        sight = self._sights[window]
        grouped = q.transpose(0, 1).reshape(n, k.shape[0], -1, size)
        part = slice(sight.first, sight.stop)
        out = self._kernels.decode(grouped, keys[:n, :, part], values[:n, :, part], sight, scale)
        return out.reshape(n, heads, size)
