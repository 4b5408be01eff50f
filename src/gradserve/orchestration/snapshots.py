"""Making versions of runs durable now and then, so that a replay after a power cut is short.

A version is due after N optimizer steps, after T seconds, or when computing again what came since the last one would
take C seconds of a worker. It is copied beside the training, which does not wait; when it can't be written (a full
disk, say) training goes on, an alarm is raised, and it is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.orchestration.alarms import Alarms
from gradserve.orchestration.held import Held
from gradserve.orchestration.manifest import Manifests
from gradserve.settings import Settings
from gradserve.store.base import Run, Store, Version, VersionCause

log = logging.getLogger(__name__)

_RETRY_S = 10.0


@dataclass
class _Pending:
    """The newest state of a run between two optimizer steps, and how far behind its last durable version is."""

    run: Run
    seq: int
    since_version: int
    since: float
    compute_ms: float
    not_before: float = 0.0


class Snapshots:
    """Times are those of time.monotonic."""

    def __init__(
        self,
        store: Store,
        objects: ObjectStore,
        manifests: Manifests,
        settings: Settings,
        alarms: Alarms,
        held: Held,
    ) -> None:
        self._store = store
        self._objects = objects
        self._manifests = manifests
        self._settings = settings
        self._alarms = alarms
        self._held = held
        self._pending: dict[str, _Pending] = {}
        self._busy: set[str] = set()

    def covered(self, run_id: str) -> None:
        """The run's newest state is durable by other means (a save, a load)."""
        self._pending.pop(run_id, None)

    def stepped(self, run: Run, seq: int, compute_ms: float) -> None:
        """An optimizer step was committed; ``compute_ms`` is what it and the Ops before it cost."""
        pending = self._pending.get(run.id)
        if pending is None:
            self._pending[run.id] = _Pending(run, seq, run.version - 1, time.monotonic(), compute_ms)
        else:
            pending.run, pending.seq = run, seq
            pending.compute_ms += compute_ms

    def due(self) -> list[tuple[str, VersionCause]]:
        """The runs that want a durable version now, and why."""
        now = time.monotonic()
        found = ((run_id, self._cause(pending, now)) for run_id, pending in self._pending.items())
        return [(run_id, cause) for run_id, cause in found if cause is not None and run_id not in self._busy]

    def _cause(self, pending: _Pending, now: float) -> VersionCause | None:
        if now < pending.not_before:
            return None
        if pending.run.version - pending.since_version >= self._settings.durable_every_steps:
            return "steps"
        if now - pending.since >= self._settings.durable_every_s:
            return "age"
        if pending.compute_ms >= 1000 * self._settings.durable_replay_s:
            return "replay"
        return None

    async def take(self, run_id: str, cause: VersionCause) -> None:
        """Make the run's newest state durable. What goes wrong raises an alarm, nothing else."""
        pending = self._pending[run_id]
        run, seq, compute_ms = pending.run, pending.seq, pending.compute_ms
        digests = [digest for digest in (run.weights, run.moments) if digest is not None]
        self._busy.add(run_id)
        self._held.add(digests)
        try:
            await self._write(run, seq, cause)
        except (OSError, ObjectMissing, ObjectCorrupt) as error:
            pending.not_before = time.monotonic() + _RETRY_S
            await self._alarms.raise_("versions", f"step {run.version} of {run.id} could not be made durable: {error}")
            return
        finally:
            self._held.release(digests)
            self._busy.discard(run_id)
        await self._alarms.clear("versions")
        if pending.seq == seq:
            self._pending.pop(run_id, None)
        else:
            pending.since_version, pending.since = run.version, time.monotonic()
            pending.compute_ms -= compute_ms

    async def _write(self, run: Run, seq: int, cause: VersionCause) -> None:
        assert run.weights is not None
        size = 0
        for digest in (run.weights, run.moments):
            if digest is not None:
                await asyncio.to_thread(self._objects.persist, digest)
                size += self._objects.size(digest)
        version = Version(
            run_id=run.id,
            tenant=run.tenant,
            version=run.version,
            seq=seq,
            weights=run.weights,
            moments=run.moments,
            cause=cause,
            size_bytes=size,
            created_at=time.time(),
            manifest=await self._manifests.of(run, seq),
        )
        await self._store.put_version(version)
