"""Objects as tensors: read through a cache, written by digest."""

from __future__ import annotations

from collections import OrderedDict

import torch

from gradserve.compute.engine import tensorfile
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.objects import ObjectStore

CACHE_BYTES = 1 << 30
"""A mapped object that was discarded stays in memory until it leaves the cache, so this is also waste at worst."""


class Arrays:
    """The object store as tensors on ``device``. Tensors that come out are shared: never change one in place."""

    def __init__(self, store: ObjectStore, device: torch.device, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._device = device
        self._limit = cache_bytes
        self._used = 0
        self._cache: OrderedDict[str, Tensors] = OrderedDict()

    def get(self, digest: str) -> Tensors:
        """The tensors of an object. Raises ObjectMissing."""
        tensors = self._cache.get(digest)
        if tensors is None:
            tensors = tensorfile.load(self._store.path(digest), self._device)
            self._keep(digest, tensors)
        else:
            self._cache.move_to_end(digest)
        return tensors

    def put(self, tensors: Tensors) -> str:
        """Write an object; returns its digest.

        Nothing is kept: on a CPU the file in shared memory *is* the tensors when it is read again.
        """
        return self._store.put(tensorfile.dump(tensors))

    def _keep(self, digest: str, tensors: Tensors) -> None:
        self._cache[digest] = tensors
        self._used += _bytes(tensors)
        while self._used > self._limit and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self._used -= _bytes(dropped)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
