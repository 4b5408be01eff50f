"""Keeps the archive up to date: uploads durable objects that are in use, removes the copies of those that are not.

Nothing waits for it. What fails is tried again in the next round, and training goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from gradserve.compute.archive import ArchiveError
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)


class Archiver:
    """``sync`` says what should be there; ``run`` brings it about.

    Only what this server itself saw becoming garbage is removed: an archive may hold more than a new or restored data
    directory knows of, and then it is the only place that still has it.
    """

    def __init__(self, objects: ObjectStore, pause_s: float = 60.0) -> None:
        self._objects = objects
        self._pause_s = pause_s
        self._wanted: set[str] = set()
        self._garbage: set[str] = set()
        self._archived: set[str] = set()
        self._changed = asyncio.Event()
        self._error: str | None = None

    def sync(self, wanted: set[str], garbage: set[str]) -> None:
        """``wanted`` are all durable objects that are in use; ``garbage`` those just removed here."""
        self._wanted = wanted
        self._archived -= garbage
        self._garbage = (self._garbage | garbage) - wanted
        if self._garbage or not wanted <= self._archived:
            self._changed.set()

    def status(self) -> dict[str, Any]:
        """What an operator must see: ``error`` is None while all goes well."""
        return {"archived": len(self._archived), "waiting": len(self._wanted - self._archived), "error": self._error}

    async def run(self) -> None:
        """Upload and remove as told, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.round()
            except (ArchiveError, OSError) as error:  # OSError: a disk that can't be read
                self._error = str(error)
                log.error("ALARM: %d objects are only on this machine: %s", self.status()["waiting"], error)
                await asyncio.sleep(self._pause_s)
                self._changed.set()

    async def round(self) -> None:
        """Do everything that is to be done now, but for damaged objects. Raises ArchiveError at the first fault."""
        damaged: str | None = None
        for digest in self._garbage.copy():
            await asyncio.to_thread(self._objects.discard_archived, digest)
            self._garbage.discard(digest)
        for digest in self._wanted - self._archived:
            try:
                await asyncio.to_thread(self._objects.archive, digest)
            except ObjectMissing:
                continue  # discarded meanwhile
            except ObjectCorrupt as corrupt:
                damaged = f"not archived: {corrupt}"
                log.error("ALARM: %s", damaged)
                continue
            self._archived.add(digest)
        self._error = damaged
