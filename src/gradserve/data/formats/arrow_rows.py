"""What Parquet and Arrow files share: batches to rows, and pyarrow's errors in our words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gradserve.data.errors import DataError
from gradserve.data.files import File
from gradserve.data.row import Found


def rows_of(file: File, batches: Callable[[Any], Iterable[Any]]) -> Iterator[Found]:
    """``batches`` gives pyarrow.RecordBatch objects from the open file."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{file.name} is read by pyarrow; pip install 'gradserve[data]'") from error
    number = 0
    with file.open() as raw:
        try:
            for batch in batches(raw):
                for row in batch.to_pylist():
                    number += 1
                    yield Found(file.name, f"row {number}", row)
        except pyarrow.ArrowException as error:
            raise DataError(f"{file.name} is damaged after row {number}: {error}; copy or write it again") from error
