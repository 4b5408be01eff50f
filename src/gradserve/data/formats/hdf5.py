"""HDF5: each dataset is a column (those in groups as ``group/name``), its first dimension are the rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gradserve.data.errors import DataError
from gradserve.data.files import File
from gradserve.data.row import Found

_BLOCK_ROWS = 1024


def read(file: File) -> Iterator[Found]:
    try:
        import h5py
    except ImportError as error:
        raise DataError(f"{file.name} is read by h5py; pip install 'gradserve[data]'") from error
    with file.open() as raw, h5py.File(raw, "r") as container:
        columns: dict[str, Any] = {}
        container.visititems(lambda name, item: columns.update({name: item} if isinstance(item, h5py.Dataset) else {}))
        for start in range(0, _rows(file.name, columns), _BLOCK_ROWS):
            block = {name: _values(column, start) for name, column in columns.items()}
            for offset in range(len(next(iter(block.values())))):
                row = {name: _value(values[offset]) for name, values in block.items()}
                yield Found(file.name, f"row {start + offset + 1}", row)


def _rows(source: str, columns: dict[str, Any]) -> int:
    scalars = sorted(name for name, column in columns.items() if not column.shape)
    if scalars:
        raise DataError(f"{source}: the dataset {scalars[0]!r} is a single value, no column; make it an attribute")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"{source}: its datasets differ in their first dimension ({said}); give each the same rows")
    return next(iter(lengths.values()), 0)


def _values(column: Any, start: int) -> Any:
    """Of [rows, ...] those from ``start``, a block."""
    import h5py

    rows = slice(start, start + _BLOCK_ROWS)
    return column.asstr()[rows] if h5py.check_string_dtype(column.dtype) else column[rows]


def _value(value: Any) -> Any:
    """Arrays stay arrays; single numbers are Python's."""
    return value.item() if isinstance(value, np.generic) else value
