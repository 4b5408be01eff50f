"""Objects as tensors: read through a cache, written by digest."""

from __future__ import annotations

from collections import OrderedDict

import torch
from safetensors.torch import load_file

from gradserve.compute.engine.drafts import Draft
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
            tensors = load_file(self._store.path(digest), device=str(self._device))  # maps the file
            self._keep(digest, tensors)
        else:
            self._cache.move_to_end(digest)
        return tensors

    def put(self, tensors: Tensors) -> str:
        """Write an object; returns its digest.

        Nothing is kept: on a CPU the file in shared memory *is* the tensors when it is read again.
        """
        with self.copy(tensors) as draft:
            return draft.commit()

    def draft(self, like: Tensors) -> Draft:
        """A new object with tensors like these, zero at first, to be computed in place."""
        return Draft(self._store, like, self._device)

    def copy(self, tensors: Tensors) -> Draft:
        """A new object that starts as a copy of ``tensors``."""
        draft = self.draft(tensors)
        for name, tensor in tensors.items():
            draft.tensors[name].copy_(tensor.detach())
        return draft

    def _keep(self, digest: str, tensors: Tensors) -> None:
        if _bytes(tensors) > self._limit // 4:
            return  # a whole model's parameters would drive out a thousand adapters; to map a file again is cheap
        self._cache[digest] = tensors
        self._used += _bytes(tensors)
        while self._used > self._limit and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self._used -= _bytes(dropped)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
