"""Remote files kept on this disk, each under a name that its content has: what changed there is fetched again."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from gradserve.data.errors import DataError

_verified: set[tuple[Path, int]] = set()
"""Copies whose bytes this process has compared with their digest, with the time of the copy."""


def fetched(fs: Any, name: str, folder: Path) -> Path:
    """The local copy of the file ``name`` of an fsspec file system; downloaded unless ``folder`` has it.

    A file counts as the same while all that the store tells of it (size, time, ETag) is; one copy of each is kept. A
    copy that does not have the bytes that came is fetched again. Several processes may share the folder, and everything
    in it may be deleted at any time. Raises DataError when the bytes that came are not as many as the store says.
    """
    fs.invalidate_cache()  # of listings, which may be older than the file
    told = fs.info(name)
    of_file = _short(fs.unstrip_protocol(name))
    identity = repr(sorted((str(key), str(value)) for key, value in told.items()))
    copy = folder / f"{of_file}-{_short(identity)}"
    if not _is_whole(copy):
        _download(fs, name, int(told["size"]), copy)
        for older in folder.glob(f"{of_file}-*"):
            if older.name.partition(".")[0] != copy.name:
                older.unlink(missing_ok=True)
    return copy


def _is_whole(copy: Path) -> bool:
    """Whether it is there with the bytes that its digest is of; each copy is read for that once in a process."""
    try:
        seen = (copy, copy.stat().st_mtime_ns)
        if seen not in _verified:
            if _digest(copy) != _digest_file(copy).read_text():
                return False
            _verified.add(seen)
    except FileNotFoundError:
        return False
    return True


def _download(fs: Any, name: str, size: int, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=copy.parent, prefix=".part-")
    os.close(descriptor)
    try:
        fs.get_file(name, draft)
        if (came := os.path.getsize(draft)) != size:
            raise DataError(f"{name}: {came} of {size} bytes came; try again")
        _digest_file(copy).write_text(_digest(Path(draft)))
        os.replace(draft, copy)
    except BaseException:
        os.unlink(draft)
        raise


def _digest_file(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.sha256")


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
