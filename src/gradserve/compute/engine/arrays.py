"""Objects as tensors: read through a cache, written by digest."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

import torch

from gradserve.compute.engine import tensorfile
from gradserve.compute.engine.drafts import Draft
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.engine.origin import Origin
from gradserve.compute.objects import ObjectStore

CACHE_BYTES = 1 << 30
"""A mapped object that was discarded stays in memory until it leaves the cache, so this is also waste at worst."""

_REMEMBERED = 64
"""Objects too large for the cache are mapped each time they are asked for, but their bytes are checked once."""


class _Object(NamedTuple):
    tensors: Tensors
    origin: Origin | None


class Arrays:
    """The object store as tensors on ``device``. Tensors that come out are shared: never change one in place."""

    def __init__(self, store: ObjectStore, device: torch.device, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._device = device
        self._limit = cache_bytes
        self._used = 0
        self._cache: OrderedDict[str, _Object] = OrderedDict()
        self._verified: deque[str] = deque(maxlen=_REMEMBERED)

    def get(self, digest: str) -> Tensors:
        """The tensors of an object, its bytes checked when it is first read. Raises ObjectMissing, ObjectCorrupt."""
        return self._read(digest).tensors

    def origin(self, digest: str) -> Origin | None:
        """Which weights an object was computed from, if it says so. Raises as ``get``."""
        return self._read(digest).origin

    def put(self, tensors: Tensors, origin: Origin | None = None) -> str:
        """Write an object; returns its digest.

        Nothing is kept: on a CPU the file in shared memory *is* the tensors when it is read again.
        """
        return self._store.put(tensorfile.dump(tensors, None if origin is None else origin.metadata()))

    def draft(self, like: Tensors, origin: Origin | None = None) -> Draft:
        """A new object with tensors like these (they may be on the meta device), to be computed in place."""
        return Draft(self._store, like, self._device, None if origin is None else origin.metadata())

    def copy(self, tensors: Tensors, origin: Origin | None = None) -> Draft:
        """A new object that starts as a copy of ``tensors``."""
        draft = self.draft(tensors, origin)
        for name, tensor in tensors.items():
            draft.tensors[name].copy_(tensor)
        return draft

    def commit(self, draft: Draft, origin: Origin | None = None) -> str:
        """The digest of the finished object; ``origin`` takes the place of the one that the draft was made with."""
        digest = draft.commit(None if origin is None else origin.metadata())
        self._verified.append(digest)
        return digest

    def _read(self, digest: str) -> _Object:
        found = self._cache.get(digest)
        if found is not None:
            self._cache.move_to_end(digest)
            return found
        path = self._store.path if digest in self._verified else self._store.verified_path
        tensors, metadata = tensorfile.load(path(digest), self._device)
        found = _Object(tensors, Origin.of(metadata))
        self._keep(digest, found)
        return found

    def _keep(self, digest: str, found: _Object) -> None:
        if _bytes(found.tensors) > self._limit // 4:
            self._verified.append(digest)
            return  # a whole model's parameters would drive out a thousand adapters
        self._cache[digest] = found
        self._used += _bytes(found.tensors)
        while self._used > self._limit and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self._used -= _bytes(dropped.tensors)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
