"""The Store on SQLite: one database file (or memory), one thread, one commit for all calls that piled up.

Each method queues a function of store/queries/ and waits for it. It is queued when the coroutine first runs, and
applied in that order, reads included. Cancelling the wait does not undo the call.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import Connection

from gradserve.store import backup, schema
from gradserve.store.base import (
    Backup,
    Checkpoint,
    Claim,
    Event,
    Fenced,
    LedgerLine,
    LedgerTotal,
    Metrics,
    Op,
    Page,
    Run,
    RunUpdate,
    SamplingSession,
    Session,
    Settlement,
    Store,
    StoredGraph,
    StoreError,
    Version,
)
from gradserve.store.queries import (
    checkpoints,
    digests,
    graphs,
    history,
    leases,
    ledger,
    ops,
    runs,
    samplers,
    sessions,
    versions,
)
from gradserve.store.writer import CommitThread
from gradserve.wire.errors import Problem

P = ParamSpec("P")
T = TypeVar("T")

_MAX_SUMS = 1024


class SqlStore(Store):
    """Make one by :meth:`at` or :meth:`in_memory`; it belongs to the event loop that opens it, once."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        now: Callable[[], float],
        *,
        path: Path | None = None,
        read_only: bool = False,
    ) -> None:
        self._connect = connect
        self._path = path
        self._read_only = read_only
        self._epoch: int | None = None
        self._now = now
        self._thread = CommitThread("gradserve-store")
        self._sums: dict[tuple[str | None, str | None, str | None], ledger.Sum] = {}

    @classmethod
    def at(cls, path: str | Path, *, read_only: bool = False, now: Callable[[], float] = time.time) -> SqlStore:
        """The store in the file ``path``, made when missing.

        With ``read_only`` it looks into a database while a server writes to it: ``open`` raises
        FileNotFoundError when there is none, and every write raises StoreError.
        """
        place = Path(path)
        opener = schema.open_read_only if read_only else schema.open_file
        return cls(lambda: opener(place), now, path=place, read_only=read_only)

    @classmethod
    def in_memory(cls, *, now: Callable[[], float] = time.time) -> SqlStore:
        """The same store without a file: for tests."""
        return cls(schema.open_memory, now)

    async def open(self) -> None:
        """Raises StoreError when the database is from a newer gradserve or not one of ours.

        One that may write takes the database over: an earlier one gets Fenced at its next write.
        """
        await self._thread.start(self._connect, self._check_lease)
        if not self._read_only:
            holder = f"process {os.getpid()} on {platform.node()}"
            self._epoch = await self._thread.call(lambda c: leases.take(c, holder, self._now()), writes=False)

    async def is_ours(self) -> bool:
        try:
            await self._thread.call(self._check_lease, writes=False)
        except Fenced:
            return False
        return True

    def _check_lease(self, connection: Connection) -> None:
        if self._epoch is not None:
            leases.require(connection, self._epoch)

    async def close(self) -> None:
        """Applies what was queued, then closes. Later calls raise RuntimeError."""
        await self._thread.stop()

    async def _read(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._thread.call(lambda c: work(c, *args, **kwargs), writes=False)

    async def _write(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._thread.call(lambda c: work(c, *args, **kwargs), writes=True)

    # sessions

    async def create_session(self, session: Session) -> None:
        await self._write(sessions.create, session)

    async def get_session(self, tenant: str, session_id: str) -> Session | None:
        return await self._read(sessions.get, tenant, session_id)

    async def touch_session(self, tenant: str, session_id: str, at: float) -> bool:
        return await self._write(sessions.touch, tenant, session_id, at)

    async def finish_session(self, tenant: str, session_id: str, finished: str, detail: str | None) -> bool:
        return await self._write(sessions.finish, tenant, session_id, finished, detail)

    async def list_sessions(self, tenant: str, limit: int, offset: int) -> tuple[list[Session], Page]:
        return await self._read(sessions.page, tenant, limit, offset)

    # ops

    async def submit(self, op: Op, new_run: Run | None = None) -> tuple[Op, bool]:
        return await self._write(ops.submit, op, new_run)

    async def reject(self, op: Op, problem: Problem) -> Op:
        return await self._write(ops.reject, op, problem)

    async def get_op(self, tenant: str | None, op_id: str) -> Op | None:
        return await self._read(ops.get, tenant, op_id)

    async def get_outcome(self, tenant: str | None, op_id: str) -> Op | None:
        return await self._read(ops.get_outcome, tenant, op_id)

    async def unfinished_ops(self) -> list[Op]:
        return await self._read(ops.unfinished)

    async def settle(self, settlement: Settlement) -> bool:
        return await self._write(ops.settle, settlement)

    async def expire_results(self, ended_before: float) -> int:
        expired = 0
        while some := await self._write(ops.expire_some, ended_before):
            expired += some
        while await self._write(ops.drop_covered_bodies, ended_before):
            pass
        return expired

    async def training_ops(self, run_id: str, after_seq: int, to_seq: int) -> list[Op]:
        return await self._read(ops.training, run_id, after_seq, to_seq)

    async def seq_of_version(self, run_id: str, version: int) -> int | None:
        return await self._read(history.seq_of_version, run_id, version)

    async def data_digest(self, run_id: str, to_seq: int) -> tuple[int, str]:
        return await self._read(ops.data_digest, run_id, to_seq)

    # runs

    async def get_run(self, tenant: str | None, run_id: str) -> Run | None:
        return await self._read(runs.get, tenant, run_id)

    async def get_run_and_session(self, tenant: str, run_id: str) -> tuple[Run, Session | None] | None:
        return await self._read(runs.get_with_session, tenant, run_id)

    async def list_runs(self, tenant: str | None, limit: int, offset: int) -> tuple[list[Run], Page]:
        return await self._read(runs.page, tenant, limit, offset)

    async def runs_of_session(self, tenant: str, session_id: str) -> list[Run]:
        return await self._read(runs.of_session, tenant, session_id)

    async def restore(self, tenant: str, update: RunUpdate, durable: Version | None, event: Event) -> None:
        await self._write(_restore, tenant, update, durable, event)

    async def set_client_state(self, tenant: str, run_id: str, digest: str | None) -> bool:
        return await self._write(runs.set_client_state, tenant, run_id, digest)

    # durable versions, metrics, events

    async def put_version(self, version: Version) -> None:
        await self._write(versions.put, version)

    async def list_versions(self, tenant: str | None, run_id: str) -> list[Version]:
        return await self._read(versions.listed, tenant, run_id)

    async def retain_versions(self, keep: int, finished_before: float) -> list[Version]:
        return await self._write(versions.retain, keep, finished_before)

    async def list_metrics(
        self, tenant: str | None, run_id: str, limit: int, offset: int
    ) -> tuple[list[Metrics], Page]:
        return await self._read(history.metrics_page, tenant, run_id, limit, offset)

    async def add_event(self, event: Event) -> None:
        await self._write(history.add_event, event)

    async def list_events(
        self, tenant: str | None, run_id: str | None, limit: int, offset: int
    ) -> tuple[list[Event], Page]:
        return await self._read(history.events_page, tenant, run_id, limit, offset)

    # sampling sessions

    async def put_sampling_session(self, session: SamplingSession) -> SamplingSession:
        return await self._write(samplers.put, session)

    async def get_sampling_session(self, tenant: str | None, sampling_session_id: str) -> SamplingSession | None:
        return await self._read(samplers.get, tenant, sampling_session_id)

    async def join_sampling_session(self, tenant: str, sampling_session_id: str) -> int | None:
        return await self._write(samplers.join, tenant, sampling_session_id)

    async def samplers_of_session(self, tenant: str, session_id: str) -> list[SamplingSession]:
        return await self._read(samplers.of_session, tenant, session_id)

    # checkpoints

    async def get_checkpoint(self, tenant: str | None, run_id: str, kind: str, name: str) -> Checkpoint | None:
        return await self._read(checkpoints.get, self._now(), tenant, run_id, kind, name)

    async def list_checkpoints(
        self, tenant: str | None, run_id: str | None, limit: int, offset: int
    ) -> tuple[list[Checkpoint], Page]:
        return await self._read(checkpoints.page, self._now(), tenant, run_id, limit, offset)

    async def name_version(self, checkpoint: Checkpoint, event: Event | None = None) -> None:
        await self._write(_name_version, checkpoint, event)

    async def put_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        return await self._write(checkpoints.put_new, self._now(), checkpoint)

    async def delete_checkpoint(self, tenant: str, run_id: str, kind: str, name: str) -> bool:
        return await self._write(checkpoints.delete, self._now(), tenant, run_id, kind, name)

    async def set_checkpoint_ttl(
        self, tenant: str, run_id: str, kind: str, name: str, expires_at: float | None
    ) -> bool:
        return await self._write(checkpoints.set_ttl, self._now(), tenant, run_id, kind, name, expires_at)

    async def set_checkpoint_public(self, tenant: str, run_id: str, kind: str, name: str, public: bool) -> bool:
        return await self._write(checkpoints.set_public, self._now(), tenant, run_id, kind, name, public)

    async def expiring_checkpoints(self, until: float) -> list[Checkpoint]:
        return await self._read(checkpoints.expiring, until)

    async def sweep_checkpoints(self, now: float) -> list[Checkpoint]:
        return await self._write(checkpoints.sweep, now)

    async def put_graph(self, graph: StoredGraph) -> None:
        await self._write(graphs.put, graph)

    async def get_graph(self, tenant: str | None, digest: str) -> StoredGraph | None:
        return await self._read(graphs.get, tenant, digest)

    async def live_digests(self) -> set[str]:
        return await self._read(digests.live)

    # copies of the database

    async def back_up(self, to: Path) -> Backup:
        if self._path is None:
            raise StoreError("a store in memory has no file to copy")
        return await asyncio.to_thread(backup.back_up, self._path, to)

    async def durable_mark(self) -> str | None:
        return await self._read(versions.mark)

    async def archive_claim(self) -> Claim:
        return await self._write(leases.archive_claim, self._now())

    # ledger

    async def ledger_lines(
        self, tenant: str | None, run_id: str | None, limit: int, offset: int
    ) -> tuple[list[LedgerLine], Page]:
        return await self._read(ledger.page, tenant, run_id, limit, offset)

    async def ledger_total(
        self, tenant: str | None, run_id: str | None = None, session_id: str | None = None
    ) -> LedgerTotal:
        # Lines never change, so each is read once; a sum is remembered only after the commit that it was read in.
        key = (tenant, run_id, session_id)
        known, complete = self._sums.pop(key, ledger.NOTHING), False
        while not complete:
            known, complete = await self._read(ledger.add_some, known, *key)
        while len(self._sums) >= _MAX_SUMS:
            del self._sums[next(iter(self._sums))]
        self._sums[key] = known
        return known.total


def _restore(connection: Connection, tenant: str, update: RunUpdate, durable: Version | None, event: Event) -> None:
    runs.update(connection, tenant, update)
    if durable is not None:
        versions.put(connection, durable)
    history.add_event(connection, event)


def _name_version(connection: Connection, checkpoint: Checkpoint, event: Event | None) -> None:
    checkpoints.put(connection, checkpoint)
    if event is not None:
        history.add_event(connection, event)
