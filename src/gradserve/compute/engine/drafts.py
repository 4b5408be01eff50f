"""Objects in the making: safetensors files whose pages are the tensors, so that what is computed is already written."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from gradserve.compute.engine.lora import Tensors
from gradserve.compute.engine.tensorfile import layout
from gradserve.compute.files import naming_full_disk
from gradserve.compute.objects import ObjectStore


class Draft:
    """Tensors of the names, shapes and dtypes of ``like``, all zero, to be written in place.

    On a CPU they are the pages of a file in the object store's fast tier: nothing is copied when ``commit`` names
    the file by its digest. Leaving the ``with`` block without a commit removes it. ``like`` may hold meta tensors.
    """

    def __init__(
        self, store: ObjectStore, like: Tensors, device: torch.device, metadata: dict[str, str] | None = None
    ) -> None:
        self._store = store
        self._file = store.temporary()
        self._like = like
        header, places = layout(like, metadata)
        self._header_bytes = len(header)
        try:
            with naming_full_disk(store.fast):
                self._pages = _map(self._file, header, places, like)
        except BaseException:
            self._file.unlink(missing_ok=True)
            raise
        self._on_host = device.type == "cpu"
        self.tensors: Tensors = (
            self._pages if self._on_host else {name: torch.zeros_like(t, device=device) for name, t in like.items()}
        )

    def commit(self, metadata: dict[str, str] | None = None) -> str:
        """The digest of the finished object. The tensors belong to it now: change them no more.

        ``metadata`` takes the place of what the draft was made with, and must be as long.
        """
        if metadata is not None:
            self._write_header(layout(self._like, metadata)[0])
        if not self._on_host:
            for name, tensor in self.tensors.items():
                self._pages[name].copy_(tensor)
        return self._store.adopt(self._file)

    def _write_header(self, header: bytes) -> None:
        if len(header) != self._header_bytes:
            raise ValueError("the new metadata is not as long as the old")
        with open(self._file, "r+b") as opened:
            opened.write(header)

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.unlink(missing_ok=True)


def _map(file: Path, header: bytes, places: dict[str, int], like: Tensors) -> Tensors:
    size = len(header) + sum(tensor.numel() * tensor.element_size() for tensor in like.values())
    with open(file, "w+b") as opened:
        _reserve(opened.fileno(), size)
        opened.write(header)
        opened.flush()
        pages = mmap.mmap(opened.fileno(), size)
    return {name: _view(pages, places[name], tensor) for name, tensor in like.items()}


def _reserve(handle: int, size: int) -> None:
    """Take the space now: a write to a page that a full file system can't provide would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.truncate(handle, size)


def _view(pages: mmap.mmap, at: int, like: Tensor) -> Tensor:
    count = math.prod(like.shape)
    if count == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(pages, dtype=like.dtype, count=count, offset=at).view(like.shape)
