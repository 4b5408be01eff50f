"""The attention of a sampling pass: rows that decode one token each, and pieces of stems.

Letters as in kv: a pool's layer is [2, S, Hkv, T, D], a stem's [2, Hkv, P, D]; N tokens of the pass, n rows of a pool,
G queries of a key head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradserve.compute.engine.arrange import Arrangement, Piece
from gradserve.compute.engine.kernels import Kernels, Sight
from gradserve.compute.engine.kv import Pool


class SamplingLayout:
    """One pass over ``pools``, whose rows decode the token at position ``cached``, and pieces, as ``arranged``."""

    def __init__(self, pools: list[Pool], arranged: Arrangement, device: torch.device, kernels: Kernels) -> None:
        self._views = [
            _PoolView(pool, slots, device, kernels) for pool, slots in zip(pools, arranged.slots, strict=True)
        ]
        self._kernels = kernels
        self._pieces = [(piece, slice(at, at + piece.count)) for piece, at in arranged.pieces]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See attention.Layout. Writes the new keys and values where they belong."""
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
        for view in self._views:
            view.attend(layer, q, k, v, scale, window, out)
        for piece, own in self._pieces:
            keys, values = _extend(piece, layer, k[:, own], v[:, own])
            out[own] = self._kernels.causal(q[:, own], keys, values, scale, window)
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
    """One pool during one pass: masks and indices are the same in all layers.

    ``slots`` are the tokens of the pass by slot.
    """

    def __init__(self, pool: Pool, slots: list[int], device: torch.device, kernels: Kernels) -> None:
        self._count = len(pool.rows)
        self._pool = pool
        self._tokens = _select(slots, device)
        self._kernels = kernels
        self._positions = [row.cached for row in pool.rows]
        self._at = torch.tensor(self._positions, device=device)
        self._places = _places(pool, self._at)
        self._sights: dict[int | None, Sight] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, out: Tensor
    ) -> None:
        """Attention of this pool's rows, from q [H, N, D], k and v [Hkv, N, D] into ``out`` [N, H, D]."""
        q, k, v = (_take(tensor.transpose(0, 1), self._tokens) for tensor in (q, k, v))
        keys, values = self._pool.data[layer]
        size = q.shape[-1]
        keys.view(-1, size).index_copy_(0, self._places, k.reshape(-1, size))
        values.view(-1, size).index_copy_(0, self._places, v.reshape(-1, size))
        if window not in self._sights:
            self._sights[window] = Sight(self._positions, window, self._at.device, self._kernels.key_block)
        sight, n = self._sights[window], self._count
        part = slice(sight.first, sight.stop)
        grouped = q.reshape(n, k.shape[1], -1, size)
        found = self._kernels.decode(grouped, keys[:n, :, part], values[:n, :, part], sight, scale)
        out[self._tokens] = found.reshape(q.shape)


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
