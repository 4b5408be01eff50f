"""Objects as tensors: read through a cache, written by digest."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from gradserve.compute.engine import tensorfile
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.objects import ObjectStore

CACHE_BYTES = 1 << 30
"""A mapped object that was discarded stays in memory until it leaves the cache, so this is also waste at worst."""
_CACHE_SHARE = 8


def cache_bytes(memory_bytes: int | None) -> int:
    """The bound of the cache in a worker whose passes may take ``memory_bytes``: an eighth of that, at most a GiB."""
    return CACHE_BYTES if memory_bytes is None else min(CACHE_BYTES, memory_bytes // _CACHE_SHARE)


@dataclass
class CacheCounts:
    """What the cache did so far, and what it holds."""

    hits: int = 0
    misses: int = 0
    objects: int = 0
    bytes: int = 0


class Arrays:
    """The object store as tensors on ``device``. Tensors that come out are shared: never change one in place."""

    def __init__(self, store: ObjectStore, device: torch.device, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._device = device
        self._limit = cache_bytes
        self.counts = CacheCounts()
        self._cache: OrderedDict[str, Tensors] = OrderedDict()

    def get(self, digest: str) -> Tensors:
        """The tensors of an object, through the cache: for weights, which many requests name. Raises ObjectMissing."""
        tensors = self._cache.get(digest)
        if tensors is None:
            self.counts.misses += 1
            tensors = self.read(digest)
            self._keep(digest, tensors)
        else:
            self.counts.hits += 1
            self._cache.move_to_end(digest)
        return tensors

    def read(self, digest: str) -> Tensors:
        """The same past the cache: for gradients and moments, which are read once. Raises ObjectMissing."""
        return tensorfile.load(self._store.path(digest), self._device)

    def put(self, tensors: Tensors) -> str:
        """Write an object; returns its digest.

        Nothing is kept: on a CPU the file in shared memory *is* the tensors when it is read again.
        """
        return self._store.put(tensorfile.dump(tensors))

    def _keep(self, digest: str, tensors: Tensors) -> None:
        self._cache[digest] = tensors
        self._count(tensors, 1)
        while self.counts.bytes > self._limit:
            _, dropped = self._cache.popitem(last=False)
            self._count(dropped, -1)

    def _count(self, tensors: Tensors, sign: int) -> None:
        self.counts.objects += sign
        self.counts.bytes += sign * _bytes(tensors)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
