"""Arrow's IPC files (Feather version 2 is the same) and IPC streams (what HF datasets caches), a batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gradserve.data.files import File
from gradserve.data.formats.arrow_rows import rows_of
from gradserve.data.row import Found

_FILE_MAGIC = b"ARROW1"


def read(file: File) -> Iterator[Found]:
    yield from rows_of(file, _batches)


def _batches(raw: Any) -> Iterable[Any]:
    import pyarrow.ipc

    magic = raw.read(len(_FILE_MAGIC))
    raw.seek(0)
    if magic != _FILE_MAGIC:
        yield from pyarrow.ipc.open_stream(raw)
        return
    batches = pyarrow.ipc.open_file(raw)
    for index in range(batches.num_record_batches):
        yield batches.get_batch(index)
