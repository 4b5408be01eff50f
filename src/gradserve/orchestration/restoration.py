"""Bringing a data directory back from the archive alone, when the machine that it was on is gone.

Layout while it goes on: arrays come to their place one by one, each whole; the database appears last, so a data
directory without one was not restored to the end, and the same call goes on with it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from gradserve.compute.archive import Archive, ArchiveDamaged, ArchiveError, ArchiveMissing
from gradserve.compute.database_copies import Copy, DatabaseCopies
from gradserve.compute.files import fsync_directory, sha256_of
from gradserve.compute.objects import SUFFIX
from gradserve.store.backup import Revived, revive
from gradserve.store.base import Checkpoint, Event, StoreError, Version

_MAY_BE_THERE = {"models", "lost+found"}
_DOWNLOADS = 4

Tell = Callable[[str], None]


class CannotRestore(Exception):
    """Nothing was restored; the message says why and what to do."""


class Restored(msgspec.Struct, frozen=True):
    """What came back. ``lost``: digests of saved arrays that the archive does not have whole, and why."""

    copy: Copy
    held: Revived
    arrays: int
    size_bytes: int
    lost: dict[str, str]


def restore(
    archive: Archive, database: Path, objects: Path, scratch: Path, tell: Tell, *, arrays: bool = True
) -> Restored:
    """Bring the newest whole copy of the database to ``database``, and its arrays to the folder ``objects``.

    Without ``arrays`` those are left for the server, which fetches what it needs when it runs with the same archive.
    ``scratch``, in the same directory, is a folder that is there until all is done. Raises CannotRestore.
    """
    root = database.parent
    _require_empty(root, {scratch.name, objects.name} if scratch.is_dir() else set())
    try:
        archive.require_protocol()
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy, held = _newest_whole(archive, scratch / database.name, tell)
        fetched = _fetch_arrays(archive, held, objects) if arrays else {}
        (scratch / database.name).rename(database)
        fsync_directory(root)
        shutil.rmtree(scratch)
    except (ArchiveError, StoreError, OSError) as error:
        raise CannotRestore(str(error)) from error
    finally:
        if not objects.exists():
            shutil.rmtree(scratch, ignore_errors=True)  # nothing to go on with
    there = [size for size in fetched.values() if isinstance(size, int)]
    named = _named(held.checkpoints) | _named(held.versions)
    lost = {digest: why for digest, why in fetched.items() if isinstance(why, str) and digest in named}
    return Restored(copy, held, len(there), sum(there), lost)


def _require_empty(root: Path, ours: set[str]) -> None:
    if not root.exists():
        return
    if found := sorted({entry.name for entry in root.iterdir()} - _MAY_BE_THERE - ours):
        raise CannotRestore(
            f"{root} is not empty ({', '.join(found[:3])}), and nothing that is there is overwritten. "
            "Name another --data-dir, or move it away."
        )


def _newest_whole(archive: Archive, to: Path, tell: Tell) -> tuple[Copy, Revived]:
    copies = DatabaseCopies(archive)
    found = copies.newest_first()
    if not found:
        raise CannotRestore(
            f"there is no copy of a database in {archive.url}. Is that the server's archive_url, to the last folder?"
        )
    for copy in found:
        try:
            to.unlink(missing_ok=True)
            copies.fetch(copy, to)
        except (ArchiveDamaged, ArchiveMissing) as damaged:
            tell(f"the copy of {copy.taken:%Y-%m-%d %H:%M:%S} UTC is passed over: {damaged}")
            continue
        return copy, revive(to, _next_epoch(copies, found), _event(archive, copy))
    raise CannotRestore(f"all {len(found)} copies of the database in {archive.url} are damaged")


def _next_epoch(copies: DatabaseCopies, found: list[Copy]) -> int:
    """Higher than every life's that wrote to the archive: so this one may take it over."""
    owner = copies.owner()
    return 1 + max([copy.epoch for copy in found] + ([] if owner is None else [owner.epoch]))


def _event(archive: Archive, copy: Copy) -> Event:
    taken = f"{copy.taken:%Y-%m-%d %H:%M:%S} UTC"
    return Event(time.time(), "restored", f"from the copy of {taken} in {archive.url}; what was newer is lost")


def _fetch_arrays(archive: Archive, held: Revived, objects: Path) -> dict[str, int | str]:
    """By digest: bytes of what is there now, or why it is not."""
    objects.mkdir(exist_ok=True)
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        return dict(zip(held.live, pool.map(partial(_fetch_array, archive, objects), held.live), strict=True))


def _fetch_array(archive: Archive, objects: Path, digest: str) -> int | str:
    target = objects / (digest + SUFFIX)
    if not (target.exists() and sha256_of(target) == digest):
        try:
            archive.get_object(digest, target)
        except (ArchiveMissing, ArchiveDamaged) as gone:
            return str(gone)
    return target.stat().st_size


def _named(saved: Iterable[Checkpoint | Version]) -> set[str]:
    return {digest for one in saved for digest in (one.weights, one.moments) if digest is not None}
