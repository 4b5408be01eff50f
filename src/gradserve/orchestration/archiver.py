"""Keeps the archive up to date: durable objects that are in use, copies of the database; removes what is not needed.

Nothing waits for it. What fails is tried again in the next round, and training goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from gradserve.compute.archive import ArchiveError
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.orchestration.database_copier import DatabaseCopier
from gradserve.store.base import Fenced, Store, StoreError

log = logging.getLogger(__name__)

_AT_STOP_S = 60.0


class Archiver:
    """``sync`` says what should be there; ``run`` brings it about.

    Only what this server itself saw becoming garbage is removed, and what only copies needed that went: an archive may
    hold more than a new or restored data directory knows of, and then it is the only place that still has it.
    """

    def __init__(self, store: Store, objects: ObjectStore, copier: DatabaseCopier, pause_s: float = 60.0) -> None:
        self._store = store
        self._objects = objects
        self._copier = copier
        self._pause_s = pause_s
        self._wanted: set[str] = set()
        self._garbage: set[str] = set()
        self._archived: set[str] = set()
        self._changed = asyncio.Event()
        self._changed.set()  # whose the archive is should be known at the start
        self._is_ours = False
        self._error: str | None = None
        self._away = False
        self._round: asyncio.Future[None] | None = None

    def sync(self, wanted: set[str], garbage: set[str]) -> None:
        """``wanted`` are all durable objects that are in use; ``garbage`` those just removed here."""
        self._wanted = wanted
        self._archived -= garbage
        self._garbage = (self._garbage | garbage) - wanted
        self._changed.set()

    def status(self) -> dict[str, Any]:
        """What an operator must see: ``error`` is None while all goes well."""
        counts = {"archived": len(self._archived), "waiting": len(self._waiting)}
        return {**counts, **self._copier.status(), "error": self._error}

    @property
    def _waiting(self) -> set[str]:
        return self._wanted - self._archived

    async def run(self) -> None:
        """Upload and remove as told, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._round = asyncio.ensure_future(self.round())
            try:
                await asyncio.shield(self._round)  # its threads can't be cancelled: close() waits for them
            except Fenced:
                raise
            except (ArchiveError, StoreError, OSError) as error:  # OSError: a disk that can't be read
                self._error, self._away = str(error), True
                log.error("ALARM: %d objects are only on this machine: %s", len(self._waiting), error)
                await asyncio.sleep(self._pause_s)
                self._changed.set()

    async def close(self) -> None:
        """The last round of an orderly stop, after all that runs need was made durable.

        It is left out when the archive was away before, and given up after a minute: the next server makes up for it.
        """
        self._copier.hasten(_AT_STOP_S)
        if self._round is not None:
            await asyncio.gather(self._round, return_exceptions=True)
        if self._away:
            log.error("ALARM: the archive is not up to date: %s", self._error)
            return
        live = await self._store.live_digests()
        self.sync({digest for digest in live if self._objects.has_durable(digest)}, set())
        try:
            await self.round(at_once=True)
        except (ArchiveError, StoreError, OSError) as error:
            log.error("ALARM: the archive is not up to date: %s", error)

    async def round(self, *, at_once: bool = False) -> None:
        """Do everything that is to be done now, but for damaged objects. Raises ArchiveError at the first fault."""
        due = at_once or await self._copier.due()
        if self._is_ours and not (due or self._waiting or await self._removable()):
            return
        await self._copier.require_owner()
        self._is_ours = True
        damaged = await self._upload(self._waiting)
        if due:
            damaged = await self._copy_database() or damaged
        for digest in await self._removable():
            await asyncio.to_thread(self._objects.discard_archived, digest)
            self._archived.discard(digest)
            self._garbage.discard(digest)
        self._error, self._away = damaged, False

    async def _copy_database(self) -> str | None:
        async with self._copier.snapshot() as snapshot:
            durable = {digest for digest in snapshot.backup.live if self._objects.has_durable(digest)}
            damaged = await self._upload(durable - self._archived)
            await self._copier.put(snapshot, self._archived)
        self._garbage |= await self._copier.drop_old()
        return damaged

    async def _upload(self, digests: set[str]) -> str | None:
        """Upload all that is whole; what is to be said of a damaged one."""
        damaged: str | None = None
        for digest in digests:
            try:
                await asyncio.to_thread(self._objects.archive, digest)
            except ObjectMissing:
                continue  # discarded meanwhile
            except ObjectCorrupt as corrupt:
                damaged = f"not archived: {corrupt}"
                log.error("ALARM: %s", damaged)
                continue
            self._archived.add(digest)
        return damaged

    async def _removable(self) -> set[str]:
        """Garbage that no copy of the database in the archive refers to any more."""
        self._garbage -= self._wanted
        return self._garbage and await self._copier.unneeded(self._garbage)
