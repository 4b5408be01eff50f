"""Files that are there whole or not at all, whatever fails while they are written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CHUNK_BYTES = 4 << 20


class NoRoom(OSError):
    """A file system is full, or a quota is used up. What was there before is untouched."""


@contextlib.contextmanager
def whole_file(target: Path, *, durable: bool = True, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that takes the name ``target`` when the block ends, in the place of an older one.

    If the block raises, nothing is left of it. ``durable``: file and name are on disk (fsync) before that.
    ``private``: only this user may read it. Raises NoRoom when the file system is full.
    """
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    with naming_full_disk(target.parent):
        try:
            with open(temporary, "xb", opener=_private if private else None) as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            fsync_directory(target.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Say which folder has no room and what to do, where the system only says that a device is full."""
    try:
        yield
    except NoRoom:
        raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        cure = "no room left; nothing that was there is damaged. Free some space, or delete checkpoints"
        raise NoRoom(error.errno, cure, str(folder)) from error


def copy_whole(source: Path, target: Path, *, private: bool = False) -> None:
    """Copy a file so that ``target`` is whole and on disk, or as it was. Raises NoRoom."""
    with open(source, "rb") as opened, whole_file(target, private=private) as sink:
        shutil.copyfileobj(opened, sink, _CHUNK_BYTES)


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's bytes in hex."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
