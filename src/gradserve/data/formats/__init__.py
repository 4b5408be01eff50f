"""One reader for each format: a file to what is found in it, row by row, good or bad."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator

from gradserve.data.errors import DataError
from gradserve.data.files import File
from gradserve.data.row import Found


def read(file: File) -> Iterator[Found]:
    """DataError if the file can't be read on; a bad row is found as a BadRow, and the next one follows."""
    # By format, so that pyarrow and h5py are needed only by those who read their files.
    reader = importlib.import_module(f"gradserve.data.formats.{_READERS[file.format]}")
    place = "its start"
    try:
        for found in reader.read(file):
            place = found.place
            yield found
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{file.name} can't be read after {place}: {type(error).__name__}: {error}; is it whole? Copy it again"
        ) from error


_READERS = {
    "jsonl": "lines",
    "csv": "comma",
    "parquet": "parquet",
    "arrow": "ipc",
    "hdf5": "hdf5",
    "tfrecord": "tfrecord",
}
"""Modules of this package; named so that none hides one of Python's."""
