"""Rows on disk that can be had by their number: what a full shuffle needs of files that are read from their start."""

from __future__ import annotations

import tempfile
import threading
from array import array

from gradserve.data.row import Row, pack, unpack


class Spool:
    """Of rows of any size, 8 bytes a row in memory. The file has no name and goes when this does; thread-safe."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the object
        self._ends = array("Q", [0])
        self._lock = threading.Lock()

    def append(self, row: Row) -> None:
        data = pack(row)
        with self._lock:
            self._file.seek(self._ends[-1])
            self._file.write(data)
            self._ends.append(self._ends[-1] + len(data))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Row:
        start, end = self._ends[index], self._ends[index + 1]
        with self._lock:
            self._file.seek(start)
            data = self._file.read(end - start)
        row: Row = unpack(data)
        return row
