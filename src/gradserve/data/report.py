"""What a source holds, for people to look at before a training pays for it."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradserve.data.errors import BadRow, DataError
from gradserve.data.row import Found, digest
from gradserve.data.source import resolve


@dataclass
class Column:
    types: Counter[str] = field(default_factory=Counter)
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    """Of its texts (characters), bytes, lists and arrays."""

    @property
    def rows(self) -> int:
        return self.types.total()

    def add(self, value: object) -> None:
        self.types[_type_name(value)] += 1
        if isinstance(value, str | bytes | list) or (isinstance(value, np.ndarray) and value.ndim):
            self.lengths.append(len(value))


@dataclass
class Report:
    rows: int = 0
    """Good ones."""
    bad: list[BadRow] = field(default_factory=list)
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    """(where, where the first one is)."""
    columns: dict[str, Column] = field(default_factory=dict)


def report(source: Any, format: str | None = None, part: str = "") -> Report:
    """Reads all of it; keeps 16 bytes and a place of each row."""
    made = Report()
    seen: dict[bytes, str] = {}
    for found in resolve(source, format, part).scan():
        if isinstance(found.row, BadRow):
            made.bad.append(found.row)
            continue
        made.rows += 1
        for name, value in found.row.items():
            made.columns.setdefault(name, Column()).add(value)
        _note_duplicate(made, seen, found)
    return made


def _note_duplicate(made: Report, seen: dict[bytes, str], found: Found) -> None:
    where = f"{found.source}, {found.place}"
    try:
        key = digest(found.row)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    first = seen.setdefault(key, where)
    if first != where:
        made.duplicates.append((where, first))


def _type_name(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array"
    if isinstance(value, list):
        inner = sorted({_type_name(item) for item in value})
        return f"list of {' or '.join(inner)}" if inner else "empty list"
    return "null" if value is None else type(value).__name__
