"""Parquet, a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gradserve.data.files import File
from gradserve.data.formats.arrow_rows import rows_of
from gradserve.data.row import Found

_BATCH_ROWS = 1024


def read(file: File) -> Iterator[Found]:
    yield from rows_of(file, _batches)


def _batches(raw: Any) -> Iterable[Any]:
    import pyarrow.parquet

    yield from pyarrow.parquet.ParquetFile(raw).iter_batches(batch_size=_BATCH_ROWS)
