"""Whatever rows come from, as one thing that can be read again and again: files, tables, iterables."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from gradserve.data.errors import BadRow, DataError
from gradserve.data.files import File, find
from gradserve.data.formats import read
from gradserve.data.row import Found

_PARTS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Names of files and folders that say what the rows are for."""


@dataclass(frozen=True)
class Source:
    scan: Callable[[], Iterator[Found]]
    """All rows from the first one, in an order that does not change."""
    identity: tuple[object, ...]
    """What shows cheaply that it is no longer the same: names and sizes of files, the number of rows."""
    at: Callable[[int], Found] | None = None
    """The row of that number (from 0), where that costs no reading of the others."""


def resolve(source: Any, format: str | None = None, part: str = "", cache: Path | None = None) -> Source:
    """``part`` picks from a mapping of names to sources, or from files that are named so; "train" is all of the rest.

    ``source``: a path, folder, glob or URL; a list of rows or a HF dataset; a function that makes an iterable of rows;
    an iterable that can be begun again.
    """
    remote = isinstance(source, str) and "://" in source
    if cache is not None and not remote and not isinstance(source, Mapping):
        raise DataError("cache= is for copies of remote files, and this source is no URL; leave it out")
    if isinstance(source, str | os.PathLike):
        return _of_files(_part_of(find(source, format, cache), part))
    if format is not None:
        raise DataError("format= is for files; this source has rows already")
    if isinstance(source, Mapping):
        return resolve(_member(source, part), cache=cache)
    if part not in ("", "train"):
        raise DataError(f"this source has no part {part!r}; all of it is 'train', and split='[90%:]' cuts it")
    if isinstance(source, Sequence) or (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        return _of_table(source)
    return _of_iterable(source)


def _of_files(files: list[File]) -> Source:
    def scan() -> Iterator[Found]:
        for file in files:
            yield from read(file)

    return Source(scan, tuple((PurePosixPath(file.name).name, file.size_bytes) for file in files))


def _part_of(files: list[File], part: str) -> list[File]:
    named = _by_part(files, {*_PARTS, part} - {""})
    there = sorted(name for name in named if name)
    if not part:
        if len(files) > 1 and len(there) > 1:
            raise DataError(f"the files have the parts {', '.join(there)}; choose one, e.g. split='{there[0]}'")
        return files
    if part in named:
        return named[part]
    if part == "train" and (len(files) == 1 or not there):
        return files
    raise DataError(f"no file is named {part!r}; there are {', '.join(there) or 'no named parts'}")


def _by_part(files: list[File], names: set[str]) -> dict[str, list[File]]:
    """Of ``data/test/0.csv`` and ``data/test-00000-of-00002.parquet`` the part is "test"; "" has those of none.

    A file's own name goes before its folders', the inner ones first, out to the folder that all files are in.
    """
    paths = [PurePath(file.name) for file in files]
    by_depth = zip(*(path.parent.parts for path in paths), strict=False)  # as deep as the file nearest to the root
    common = len(list(itertools.takewhile(lambda folders: len(set(folders)) == 1, by_depth)))
    parts: dict[str, list[File]] = {}
    for file, path in zip(files, paths, strict=True):
        words = [re.split(r"[-_.]", path.name)[0], *reversed(path.parent.parts[max(0, common - 1) :])]
        parts.setdefault(next((word for word in words if word in names), ""), []).append(file)
    return parts


def _member(source: Mapping[str, Any], part: str) -> Any:
    names = ", ".join(map(str, source))
    if not part and len(source) == 1:
        return next(iter(source.values()))
    if part not in source:
        raise DataError(f"the source has the parts {names}; choose one, e.g. split='{next(iter(source), 'train')}'")
    return source[part]


def _of_table(table: Any) -> Source:
    def at(index: int) -> Found:
        return _found(type(table).__name__, index, table[index])

    return Source(lambda: map(at, range(len(table))), (len(table),), at)


def _of_iterable(source: Callable[[], Iterable[Any]] | Iterable[Any]) -> Source:
    if isinstance(source, Iterator):
        raise DataError("a generator can be read only once; give the function that makes it, without calling it")
    if not callable(source) and not isinstance(source, Iterable):
        raise DataError(f"a {type(source).__name__} is no source of rows; give a path, a list of dicts or a HF dataset")
    name = getattr(source, "__name__", type(source).__name__)

    def scan() -> Iterator[Found]:
        rows = source() if callable(source) else source
        return (_found(name, index, row) for index, row in enumerate(rows))

    return Source(scan, (name,))


def _found(name: str, index: int, row: object) -> Found:
    place = f"row {index + 1}"
    if isinstance(row, Mapping):
        return Found(name, place, dict(row))
    reason = f"a {type(row).__name__}, not a dict of columns"
    return Found(name, place, BadRow(name, place, reason, "make it a dict"))
