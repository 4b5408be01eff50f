"""Removes arrays that nothing refers to any more, expired checkpoints and old results.

Only objects that are older than a grace period are touched: a younger one may just have been made by a worker
whose message is still on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.files import NoRoom
from gradserve.compute.objects import ObjectCorrupt, ObjectStore
from gradserve.orchestration.archiver import Archiver
from gradserve.orchestration.clock import SteadyClock
from gradserve.settings import Settings
from gradserve.store.base import Checkpoint, Event, EventKind, Fenced, Store

log = logging.getLogger(__name__)

_GRACE_S = 10.0
_LONGEST_PAUSE_S = 60.0
_SHORTEST_PAUSE_S = 2.0
_DEMOTE_AFTER_S = 60.0
_WARN_S = 24 * 3600.0


class Janitor:
    """``in_use`` names the digests that the scheduler holds in memory; ``hot`` those that it will need again soon."""

    def __init__(
        self,
        store: Store,
        objects: ObjectStore,
        folders: CheckpointFolders,
        settings: Settings,
        in_use: Callable[[], set[str]],
        hot: Callable[[], set[str]],
        archiver: Archiver | None = None,
    ) -> None:
        self._store = store
        self._objects = objects
        self._folders = folders
        self._settings = settings
        self._in_use = in_use
        self._hot = hot
        self._archiver = archiver
        self._clock = SteadyClock()
        self._warned: set[tuple[str, float]] = set()
        self._wanted = asyncio.Event()

    def hint(self) -> None:
        """Arrays were just replaced, or made durable."""
        self._wanted.set()

    async def run(self) -> None:
        """Sweep now and then, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LONGEST_PAUSE_S):
                    await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.sweep()
            except Fenced:
                raise
            except Exception:
                log.exception("sweep failed; the next one is in a minute")
            await asyncio.sleep(_SHORTEST_PAUSE_S)

    async def sweep(self) -> None:
        """One round: expired checkpoints, old results, unreferenced arrays, arrays that may leave shared memory."""
        now = self._clock.now()
        await self._warn_of_expiry(now)
        for checkpoint in await self._store.sweep_checkpoints(now):
            self._folders.remove(checkpoint.run_id, checkpoint.kind, checkpoint.name)
            await self._store.add_event(_expiry(checkpoint, now, "checkpoint_expired", "has expired"))
        # First a write: a server that was taken over must not remove anything.
        await self._store.expire_results(now - self._settings.result_ttl_s)
        await self._store.retain_versions(self._settings.keep_versions, now - self._settings.finished_ttl_s)
        # The age is taken before the references, so that what is made in between counts as young.
        fast = self._objects.fast_older_than(_GRACE_S)
        durable = self._objects.durable_older_than(_GRACE_S)
        # In use before or after the look into the store: a digest may pass from memory to the journal meanwhile.
        live = self._in_use()
        live |= await self._store.live_digests()
        live |= self._in_use()
        garbage = {*fast, *durable} - live
        for digest in garbage:
            self._objects.discard_older_than(digest, _GRACE_S)  # not what was made again while we looked
        await self._demote(live - self._hot())
        if self._archiver is not None:
            wanted = {digest for digest in live if self._objects.has_durable(digest)}
            self._archiver.sync(wanted, garbage.intersection(durable))

    async def _warn_of_expiry(self, now: float) -> None:
        """One event for each checkpoint that expires within a day (a restarted server may say it again)."""
        for checkpoint in await self._store.expiring_checkpoints(now + _WARN_S):
            known = (checkpoint.path, checkpoint.expires_at or 0.0)
            if known not in self._warned and (checkpoint.expires_at or 0.0) > now:
                self._warned.add(known)
                hours = ((checkpoint.expires_at or 0.0) - now) / 3600
                words = f"expires in {hours:.1f} h (step {checkpoint.version})"
                await self._store.add_event(_expiry(checkpoint, now, "checkpoint_expires", words))

    async def _demote(self, cold: set[str]) -> None:
        """Move to disk what only a sampling session or a checkpoint keeps alive, so that shared memory stays small."""
        for digest in set(self._objects.fast_older_than(_DEMOTE_AFTER_S)) & cold:
            try:
                await asyncio.to_thread(self._objects.demote, digest)
            except ObjectCorrupt as corrupt:
                log.error("stays in shared memory: %s", corrupt)
            except NoRoom as full:
                log.error("ALARM: arrays that are not needed now stay in shared memory: %s", full)
                return


def _expiry(checkpoint: Checkpoint, at: float, kind: EventKind, words: str) -> Event:
    return Event(at, kind, f"{checkpoint.path} {words}", checkpoint.tenant, checkpoint.run_id)
