"""Keys and values of the sequences that are being sampled.

Sequences lie in *pools* by length class T (64, 128, 256, ... tokens): a pool is one array per layer, its rows are
always slots 0 .. n-1, so that a decode step reads plain views. A sequence that outgrows its class is copied to
the next one; the holes that sequences leave are filled with the last row. What is computed is also kept as a prefix
for later requests (prefix.py). Memory is bounded by ``limit_bytes``, prefixes included: they go when sequences need
the room.

Shape of a pool's layer: [2 (key, value), S, Hkv, T, D]; of a stem: [L, 2, Hkv, P, D]. Invariant: what lies beyond
a row's own tokens is zero, because masked positions still meet the softmax's zeros: 0 * nan would be nan.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from gradserve.compute.engine.prefix import BLOCK, PrefixCache
from gradserve.compute.engine.sequences import Sequence, Stem

_SMALLEST = 64


class Pool:
    """The sequences of one length class; ``rows[i]`` is in slot i."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows: list[Sequence] = []
        self.data: list[Tensor] = []

    @property
    def capacity(self) -> int:
        """S"""
        return self.data[0].shape[1] if self.data else 0


class KvCache:
    """All pools and stems of one base."""

    def __init__(self, config: Any, context: int, limit_bytes: int, device: torch.device, dtype: torch.dtype) -> None:
        self._layers: int = config.num_hidden_layers
        self._heads: int = config.num_key_value_heads
        self._head: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._context = context
        self._device = device
        self._dtype = dtype
        self._limit_tokens: int = limit_bytes // (self._layers * 2 * self._heads * self._head * dtype.itemsize)
        self._stem_tokens = 0
        self._prefixes = PrefixCache()
        self._pools: dict[int, Pool] = {}

    def pools(self) -> list[Pool]:
        """Those with rows, shortest first."""
        return [self._pools[length] for length in sorted(self._pools)]

    def rows(self) -> list[Sequence]:
        """All sequences that have a slot."""
        return [row for pool in self.pools() for row in pool.rows]

    @property
    def live_tokens(self) -> int:
        """Token places allocated to stems and sequences."""
        return self._stem_tokens + sum(pool.capacity * pool.length for pool in self._pools.values())

    @property
    def used_tokens(self) -> int:
        """Token places allocated to anything, prefixes included."""
        return self.live_tokens + self._prefixes.tokens

    def cached_blocks(self, names: Many[bytes]) -> int:
        """How many blocks from the start of this chain would be found."""
        return self._prefixes.match(names)

    def has_room_for(self, stem: Stem) -> bool:
        """Whether the stem and a first sequence from it would fit."""
        self._prefixes.touch(stem.readable)
        return self._make_room(len(stem.ids) + self._class_of(len(stem.ids) + 1))

    def open(self, stem: Stem) -> None:
        """Give the stem its arrays, whatever the bound, and in them what is known of its beginning."""
        self._prefixes.touch(stem.readable)
        self._make_room(len(stem.ids), force=True)
        stem.kv = torch.zeros(
            (self._layers, 2, self._heads, len(stem.ids), self._head), device=self._device, dtype=self._dtype
        )
        self._stem_tokens += len(stem.ids)
        found = stem.readable[: self._prefixes.match(stem.readable)]
        self._prefixes.read(found, stem.kv)
        stem.done = BLOCK * len(found)

    def close(self, stem: Stem) -> None:
        """Take the arrays back; what was computed is forgotten."""
        if stem.kv is not None:
            self._stem_tokens -= len(stem.ids)
        stem.kv, stem.done = None, 0

    def remember(self, names: Many[bytes], holder: Stem | Sequence) -> None:
        """Keep these computed blocks of a stem or a row as prefixes, as far as older prefixes can make room."""
        layers = _layers(holder)
        own = set(names)
        for index in range(self._prefixes.match(names), len(names)):
            while self.used_tokens + BLOCK > self._limit_tokens:
                oldest = self._prefixes.oldest()
                if oldest is None or oldest in own:
                    return
                self._prefixes.drop()
            self._prefixes.put(names[index], layers, index)
        self._prefixes.touch(names)

    def place(self, row: Sequence, stem: Stem, force: bool) -> bool:
        """Copy a complete stem into a slot for ``row``; False when that would exceed the bound (never if ``force``)."""
        assert stem.kv is not None
        pool = self._slot_in(self._class_of(len(stem.ids) + 1), force)
        if pool is None:
            return False
        slot = len(pool.rows)
        for data, kv in zip(pool.data, stem.kv.unbind(), strict=True):
            data[:, slot, :, : len(stem.ids)] = kv
        row.cached = len(stem.ids)
        _enter(row, pool)
        return True

    def make_next_place(self, row: Sequence, force: bool) -> bool:
        """See to it that ``row`` can take one more token, in a longer class if need be; False: the bound forbids."""
        old = row.pool
        assert old is not None
        if row.cached < old.length:
            return True
        new = self._slot_in(self._class_of(row.cached + 1), force)
        if new is None:
            return False
        slot = len(new.rows)
        for source, target in zip(old.data, new.data, strict=True):
            target[:, slot, :, : row.cached] = source[:, row.slot]
        self.remove(row)
        _enter(row, new)
        return True

    def remove(self, row: Sequence) -> None:
        """Free the row's slot: the pool's last row moves in, and the slot it leaves becomes zero."""
        pool = row.pool
        assert pool is not None
        last = pool.rows.pop()
        dirty = max(row.cached, last.cached) + 1  # an aborted pass may have written one more
        for data in pool.data:
            if last is not row:
                data[:, row.slot, :, :dirty] = data[:, last.slot, :, :dirty]
            data[:, last.slot, :, :dirty] = 0
        if last is not row:
            pool.rows[row.slot] = last
            last.slot = row.slot
        row.pool = None
        if not pool.rows:
            del self._pools[pool.length]

    def _class_of(self, tokens: int) -> int:
        """The smallest class that holds so many."""
        length = _SMALLEST
        while length < tokens:
            length *= 2
        return min(length, self._context)

    def _slot_in(self, length: int, force: bool) -> Pool | None:
        """A pool of that class with a free slot at its end."""
        pool = self._pools.get(length) or Pool(length)
        rows = len(pool.rows)
        if rows == pool.capacity:
            for capacity in (max(1, 2 * rows), rows + 1):
                if self._make_room((capacity - rows) * length):
                    break
            else:
                if not force:
                    return None
                self._make_room(length, force=True)
            self._resize(pool, capacity)
        self._pools[length] = pool
        return pool

    def _make_room(self, tokens: int, force: bool = False) -> bool:
        """Whether so many more places fit, after giving up empty slots and prefixes if that is what it takes.

        Where it wouldn't be enough nothing is given up, unless ``force``.
        """
        idle = sum((pool.capacity - len(pool.rows)) * pool.length for pool in self._pools.values())
        missing = self.live_tokens + tokens - self._limit_tokens
        if missing > idle and not force:
            return False
        if missing > 0:
            for pool in self._pools.values():
                self._resize(pool, len(pool.rows))
        while self._prefixes.tokens and self.used_tokens + tokens > self._limit_tokens:
            self._prefixes.drop()
        return missing <= idle

    def _resize(self, pool: Pool, capacity: int) -> None:
        """Layer by layer, so that only one layer exists twice at a time."""
        if capacity == pool.capacity:
            return
        rows = len(pool.rows)
        for layer in range(self._layers):
            data = torch.zeros(
                (2, capacity, self._heads, pool.length, self._head), device=self._device, dtype=self._dtype
            )
            if layer == len(pool.data):
                pool.data.append(data)
            else:
                data[:, :rows] = pool.data[layer][:, :rows]
                pool.data[layer] = data


def _enter(row: Sequence, pool: Pool) -> None:
    row.pool, row.slot = pool, len(pool.rows)
    pool.rows.append(row)


def _layers(holder: Stem | Sequence) -> Many[Tensor]:
    """[2, Hkv, T, D] by layer."""
    if isinstance(holder, Stem):
        assert holder.kv is not None
        return holder.kv.unbind()
    assert holder.pool is not None
    return [data[:, holder.slot] for data in holder.pool.data]
