"""What a path, glob, folder or URL names: files in the order of their names, each with its format."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from gradserve.data.cache import fetched
from gradserve.data.errors import DataError

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
}
"""Suffixes; each may be followed by .gz where the format is read from its start to its end."""

STREAMED = frozenset({"jsonl", "csv", "tfrecord"})


@dataclass(frozen=True)
class File:
    name: str
    """As a person would find it: a path or a URL."""
    size_bytes: int
    format: str
    gzipped: bool
    open: Callable[[], BinaryIO]


def find(source: str | os.PathLike[str], format: str | None = None, cache: Path | None = None) -> list[File]:
    """At least one file; DataError if there is none. A folder gives all files in it that have a known suffix.

    ``cache`` is a folder for copies of remote files.
    """
    if format is not None and format not in FORMATS.values():
        raise DataError(f"there is no format {format!r}; choose one of {', '.join(sorted(set(FORMATS.values())))}")
    text = os.fspath(source)
    files = _remote(text, format, cache) if "://" in text else _local(text, format)
    if not files:
        raise DataError(f"{text} names no file that can be read; known are {', '.join(FORMATS)}, or give format=")
    return files


def _local(text: str, format: str | None) -> list[File]:
    path = Path(text).expanduser()
    if path.is_dir():
        found = [str(file) for file in path.rglob("*") if file.is_file()]
        paths = _readable(found, format)
    elif path.exists():
        paths = [str(path)]
    else:
        paths = sorted(file for file in glob.glob(str(path), recursive=True) if os.path.isfile(file))
        if not paths:
            raise DataError(f"there is no {text}; give the path of a file, a folder, a glob or a URL")
    return [_file(name, os.path.getsize(name), format, _opener(name)) for name in paths]


def _opener(name: str) -> Callable[[], BinaryIO]:
    return lambda: open(name, "rb")


def _remote(url: str, format: str | None, cache: Path | None) -> list[File]:
    try:
        import fsspec
    except ImportError as error:
        raise DataError(f"{url} is read by fsspec; pip install 'gradserve[data]' (for s3:// gradserve[s3])") from error
    try:
        fs, path = fsspec.core.url_to_fs(url)
        if fs.isdir(path):
            names = _readable(fs.find(path), format)
        else:
            names = sorted(fs.glob(path)) if glob.has_magic(path) else [path]
        return [
            _file(fs.unstrip_protocol(name), int(fs.size(name)), format, _remote_opener(fs, name, cache))
            for name in names
        ]
    except (OSError, ImportError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{url} can't be read: {type(error).__name__}: {error}") from error


def _remote_opener(fs: Any, name: str, cache: Path | None) -> Callable[[], BinaryIO]:
    if cache is None:
        return lambda: cast(BinaryIO, fs.open(name, "rb"))
    return lambda: open(fetched(fs, name, cache), "rb")


def _readable(names: Iterable[str], format: str | None) -> list[str]:
    """Those that are no hidden files, and of which the suffix says the format, unless it is given."""
    shown = [name for name in names if not PurePosixPath(name).name.startswith((".", "_"))]
    return sorted(name for name in shown if format is not None or _suffix(name)[0] in FORMATS)


def _suffix(name: str) -> tuple[str, bool]:
    """And whether it is gzipped."""
    path = PurePosixPath(name.lower())
    if path.suffix == ".gz":
        return PurePosixPath(path.stem).suffix, True
    return path.suffix, False


def _file(name: str, size_bytes: int, format: str | None, open_: Callable[[], BinaryIO]) -> File:
    suffix, gzipped = _suffix(name)
    format = format or FORMATS.get(suffix)
    if format is None:
        raise DataError(f"nothing tells the format of {name}; known are {', '.join(FORMATS)}, or give format=")
    if gzipped and format not in STREAMED:
        raise DataError(f"{name}: {format} can't be read through gzip; unpack it first")
    return File(name, size_bytes, format, gzipped, open_)
