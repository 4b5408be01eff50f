"""Takes copies of the database to the archive, and lets the oldest go.

A copy is due when a durable version or a checkpoint was written or deleted since the last one. Taking copies may use a
twentieth of the time: one that took ten seconds is followed by another no sooner than after 200.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradserve.compute.archive import Archive, ArchiveDamaged, ArchiveMissing
from gradserve.compute.database_copies import DatabaseCopies, Needs, Owner
from gradserve.orchestration.held import Held
from gradserve.store.base import Backup, Store, Version

log = logging.getLogger(__name__)

KEPT = 3
"""Copies in the archive: the newest may turn out to be damaged."""

_PAUSE_S = 30.0
_PAUSE_PER_S = 20.0


@dataclass(frozen=True)
class Snapshot:
    """A copy of the database in ``file``, not yet in the archive."""

    file: Path
    backup: Backup
    mark: str | None


class DatabaseCopier:
    """``scratch`` is a folder of its own on a disk with room for a copy."""

    def __init__(self, store: Store, archive: Archive, held: Held, scratch: Path, pause_s: float = _PAUSE_S) -> None:
        self._store = store
        self._archive = archive
        self._copies = DatabaseCopies(archive)
        self._held = held
        self._scratch = scratch
        self._pause_s = pause_s
        self._mark: str | None = None
        self._not_before = 0.0
        self._taken_at: float | None = None
        self._manifests: set[str] = set()
        self._kept: Needs | None = None
        self._kept_is_known = False

    def status(self) -> dict[str, Any]:
        """When the newest copy of this server's life was taken, in seconds since 1970; None before the first."""
        return {"database_copied_at": self._taken_at}

    async def require_owner(self) -> None:
        """Raises ArchiveTaken when another data directory writes to the archive."""
        await asyncio.to_thread(self._copies.require_owner, await self._owner())

    async def due(self) -> bool:
        """Whether a copy should be taken now."""
        return time.monotonic() >= self._not_before and await self._store.durable_mark() != self._mark

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Snapshot]:
        """A copy of the database for the block, in which nothing that it refers to is discarded."""
        started = time.monotonic()
        mark = await self._store.durable_mark()
        with self._held.during() as held:
            self._hold(held, await self._store.live_digests())  # before: so that nothing goes while it is taken
            shutil.rmtree(self._scratch, ignore_errors=True)  # of a server that was killed
            self._scratch.mkdir(mode=0o700, parents=True)
            try:
                file = self._scratch / "gradserve.db"
                backup = await self._store.back_up(file)
                self._hold(held, backup.live)
                yield Snapshot(file, backup, mark)
            finally:
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._not_before = time.monotonic() + max(self._pause_s, _PAUSE_PER_S * (time.monotonic() - started))

    def _hold(self, held: list[str], digests: set[str]) -> None:
        self._held.add(digests)
        held.extend(digests)

    async def put(self, snapshot: Snapshot, archived: set[str]) -> None:
        """Upload it with its manifests. ``archived`` are objects that are known to be in the archive."""
        backup = snapshot.backup
        objects = backup.live & archived
        if backup.live - objects:  # in shared memory only, or left in the archive by a restore
            objects |= backup.live & await asyncio.to_thread(self._archive.objects)
        _say_lost(backup.versions, objects)
        manifests = {_manifest(version): version.manifest for version in backup.versions}
        for name in manifests.keys() - self._manifests:
            await asyncio.to_thread(self._archive.put_text, name, manifests[name])
            self._manifests.add(name)
        needs = Needs(frozenset(objects), frozenset(manifests))
        epoch = (await self._owner()).epoch
        await asyncio.to_thread(self._copies.put, snapshot.file, epoch, backup.taken_at, needs)
        self._mark, self._taken_at, self._kept_is_known = snapshot.mark, backup.taken_at, False

    def hasten(self, within_s: float) -> None:
        """Give everything up that has not ended till then."""
        self._archive.hasten(within_s)

    async def unneeded(self, digests: set[str]) -> set[str]:
        """Those that no copy in the archive refers to; none of them while a copy doesn't say what it needs."""
        if not self._kept_is_known:
            self._kept, self._kept_is_known = await self._needs_of_all(), True
        return set() if self._kept is None else digests - self._kept.objects

    async def drop_old(self) -> frozenset[str]:
        """Remove all but the newest copies, and manifests that nothing needs then; objects that nothing needs then."""
        copies = await asyncio.to_thread(self._copies.newest_first)
        gone = Needs()
        for copy in [*copies[KEPT:], *await asyncio.to_thread(self._copies.orphans)]:
            with contextlib.suppress(ArchiveDamaged, ArchiveMissing):  # then what it needed stays
                gone |= await asyncio.to_thread(self._copies.needs, copy)
            await asyncio.to_thread(self._copies.drop, copy)
        kept = self._kept = await self._needs_of_all()
        self._kept_is_known = True
        if kept is None:
            return frozenset()
        for name in (gone - kept).manifests:
            await asyncio.to_thread(self._archive.remove, name)
            self._manifests.discard(name)
        return (gone - kept).objects

    async def _needs_of_all(self) -> Needs | None:
        total = Needs()
        for copy in await asyncio.to_thread(self._copies.newest_first):
            try:
                total |= await asyncio.to_thread(self._copies.needs, copy)
            except (ArchiveDamaged, ArchiveMissing) as error:
                log.error("nothing is removed from the archive: %s", error)
                return None
        return total

    async def _owner(self) -> Owner:
        claim = await self._store.archive_claim()
        return Owner(claim.epoch, claim.token)


def _manifest(version: Version) -> str:
    return f"manifests/{version.run_id.replace(':', '_')}/{version.version:08d}-{version.seq:08d}.json"


def _say_lost(versions: list[Version], objects: set[str]) -> None:
    named = {digest for version in versions for digest in (version.weights, version.moments) if digest}
    if lost := named - objects:
        log.error("ALARM: the copy of the database names %d arrays that are lost or damaged: %s", len(lost), *lost)
