"""One thread that owns the database connection, and group commit.

Work is queued as functions of a connection. The thread takes what has piled up, runs it in the order it was queued
inside one transaction, commits once, and only then answers. Invariants: first in, first applied; a reader sees
every write queued before it; what was answered is committed; a write that raises undoes itself and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from gradserve.store.base import StoreError

T = TypeVar("T")

MAX_BATCH = 256
"""Calls in one transaction: more would only make the first of them wait longer."""


class _Job(NamedTuple):
    work: Callable[[Connection], Any]
    writes: bool
    future: asyncio.Future[Any]


class _Outcome(NamedTuple):
    value: Any = None
    error: Exception | None = None


class CommitThread:
    """Belongs to the event loop that started it. ``call`` and ``stop`` are for that loop only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._accepting = False
        self._guard: Callable[[Connection], None] = lambda _: None

    async def start(
        self, connect: Callable[[], Connection], guard: Callable[[Connection], None] = lambda _: None
    ) -> None:
        """Start the thread; it makes its connection by ``connect``, whose exception is raised here.

        ``guard`` is called first in every transaction that writes; what it raises fails the whole of it.
        """
        self._guard = guard
        if self._thread is not None:
            raise RuntimeError("the store was opened before")
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(connect, ready), name=self._name, daemon=True)
        self._thread.start()
        try:
            await ready
        except BaseException:
            self._queue.put(None)
            raise
        self._accepting = True

    def call(self, work: Callable[[Connection], T], *, writes: bool) -> asyncio.Future[T]:
        """Queue ``work``. It is run even when nobody waits for the future any more."""
        if not self._accepting or self._loop is None:
            raise RuntimeError("the store is not open")
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Job(work, writes, future))
        return future

    async def stop(self) -> None:
        """Refuse new calls, run those queued, close the connection, end the thread. Twice is once."""
        if self._thread is None:
            return
        if self._accepting:
            self._accepting = False
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # Everything below runs in the thread.

    def _main(self, connect: Callable[[], Connection], ready: asyncio.Future[None]) -> None:
        try:
            connection = connect()
        except Exception as error:
            self._answer([ready], [_Outcome(error=_plain(error))])
            return
        self._answer([ready], [_Outcome()])
        with contextlib.closing(connection):
            stopping = False
            while not stopping:
                batch, stopping = self._take()
                if batch:
                    self._answer([job.future for job in batch], _run(connection, batch, self._guard))

    def _take(self) -> tuple[list[_Job], bool]:
        """What has piled up (waiting for the first), and whether the end was reached."""
        batch: list[_Job] = []
        job = self._queue.get()
        while job is not None:
            batch.append(job)
            if len(batch) == MAX_BATCH:
                return batch, False
            try:
                job = self._queue.get_nowait()
            except Empty:
                return batch, False
        return batch, True

    def _answer(self, futures: Sequence[asyncio.Future[Any]], outcomes: Sequence[_Outcome]) -> None:
        assert self._loop is not None
        # A loop that is closed has nobody left to tell; the work itself is committed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_resolve, futures, outcomes)


def _resolve(futures: Sequence[asyncio.Future[Any]], outcomes: Sequence[_Outcome]) -> None:
    for future, outcome in zip(futures, outcomes, strict=True):
        if future.done():  # cancelled by its caller
            continue
        if outcome.error is None:
            future.set_result(outcome.value)
        else:
            future.set_exception(outcome.error)


def _run(connection: Connection, batch: Sequence[_Job], guard: Callable[[Connection], None]) -> list[_Outcome]:
    """All of ``batch`` in one transaction. When that can't be committed, all of it has failed.

    SQLite itself may give up a transaction in the middle (disk full): the savepoints are gone then, and the error of
    the missing savepoint leads here too.
    """
    try:
        with connection.begin():
            if any(job.writes for job in batch):
                guard(connection)
            if len(batch) == 1:
                return [_alone(connection, batch[0])]
            return [_attempt(connection, job) for job in batch]
    except Exception as error:  # whatever it was, the thread must live and callers must be answered
        return [_Outcome(error=_plain(error)) for _ in batch]


def _alone(connection: Connection, job: _Job) -> _Outcome:
    """A call that has the transaction to itself needs no savepoint; one that lost the transaction has failed."""
    value = job.work(connection)
    if not connection.connection.in_transaction:
        raise StoreError("the database gave up the transaction")
    return _Outcome(value)


def _attempt(connection: Connection, job: _Job) -> _Outcome:
    if not job.writes:
        try:
            return _Outcome(job.work(connection))
        except Exception as error:
            return _Outcome(error=_plain(error))
    # Not begin_nested(): its bookkeeping costs more than a typical write.
    connection.exec_driver_sql("SAVEPOINT job")
    try:
        value = job.work(connection)
    except Exception as error:
        connection.exec_driver_sql("ROLLBACK TO job")
        connection.exec_driver_sql("RELEASE job")
        return _Outcome(error=_plain(error))
    connection.exec_driver_sql("RELEASE job")
    return _Outcome(value)


def _plain(error: Exception) -> Exception:
    """The error as callers may see it: nothing of SQLAlchemy's."""
    if not isinstance(error, SQLAlchemyError):
        return error
    plain = StoreError(f"the database refused: {getattr(error, 'orig', None) or error}")
    plain.__cause__ = error
    return plain
