"""Objects as tensors: read through a cache, written by digest."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradserve.compute.engine import tensorfile
from gradserve.compute.engine.drafts import Draft
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.engine.origin import Origin
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


_REMEMBERED = 64
"""Objects too large for the cache are mapped each time they are asked for, but their bytes are checked once."""


class Stored(NamedTuple):
    """What an object holds, and of which weights it is (None: it does not say; weights do not)."""

    tensors: Tensors
    origin: Origin | None


class Arrays:
    """The object store as tensors on ``device``. Tensors that come out are shared: never change one in place."""

    def __init__(self, store: ObjectStore, device: torch.device, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._device = device
        self._limit = cache_bytes
        self.counts = CacheCounts()
        self._cache: OrderedDict[str, Tensors] = OrderedDict()
        self._verified: deque[str] = deque(maxlen=_REMEMBERED)

    def get(self, digest: str) -> Tensors:
        """The tensors of an object, through the cache: for weights, which many requests name.

        Raises ObjectMissing, ObjectCorrupt (bytes are checked when a process first reads them).
        """
        tensors = self._cache.get(digest)
        if tensors is None:
            self.counts.misses += 1
            tensors = self.read(digest).tensors
            self._keep(digest, tensors)
        else:
            self.counts.hits += 1
            self._cache.move_to_end(digest)
        return tensors

    def read(self, digest: str) -> Stored:
        """The same past the cache, with its origin: for gradients and moments, read once. Raises as ``get``."""
        path = self._store.path if digest in self._verified else self._store.verified_path
        tensors, metadata = tensorfile.load(path(digest), self._device)
        return Stored(tensors, Origin.of(metadata))

    def document(self, digest: str) -> bytes:
        """The bytes of an object that is no tensors. Raises as ``get``."""
        return self._store.verified_path(digest).read_bytes()

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

    def _keep(self, digest: str, tensors: Tensors) -> None:
        if _bytes(tensors) > self._limit // 4:
            self._verified.append(digest)
            return  # a whole model's parameters would drive out a thousand adapters
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
