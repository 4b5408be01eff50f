"""What was answered is on disk; calls keep their order; one failure is one failure."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gradserve.store import schema
from gradserve.store.base import IdentityConflict, RunUpdate, Store, StoreError
from gradserve.store.sql import SqlStore
from gradserve.store.writer import MAX_BATCH, CommitThread
from tests.contract.store_cases import (
    PROBLEM,
    a_checkpoint,
    a_line,
    a_sampler,
    a_session,
    an_op,
    create_run,
    each_store,
    end,
    on_store,
    write_checkpoint,
    write_line,
)

# order and neighbours


@each_store
async def test_calls_are_applied_in_the_order_they_were_queued(store: Store) -> None:
    op = an_op(1)
    results = await asyncio.gather(
        store.get_op(None, op.id),
        store.submit(op),
        store.get_op(None, op.id),
        store.settle(end(op)),
        store.settle(end(op)),
        store.unfinished_ops(),
        store.expire_results(1e9),
    )
    assert results == [None, (op, True), op, True, False, [], 1]


@each_store
async def test_answers_come_in_the_order_of_the_calls(store: Store) -> None:
    """More calls than one transaction takes; every tenth one fails."""
    finished: list[int] = []
    await store.submit(an_op(0, id="taken"))

    async def call(n: int) -> None:
        op = an_op(n, id="taken" if n % 10 == 0 else f"op {n}")
        try:
            await store.submit(op)
        except IdentityConflict:
            assert n % 10 == 0
        finished.append(n)

    count = 2 * MAX_BATCH + 88
    await asyncio.gather(*(call(n) for n in range(1, count)))
    assert finished == list(range(1, count))
    kept = [op.seq for op in await store.unfinished_ops()]
    assert kept == [n for n in range(count) if n == 0 or n % 10]


@each_store
async def test_a_failing_call_does_not_undo_its_neighbours(store: Store) -> None:
    await write_line(store, a_line(7, "1"))
    ops = [an_op(seq) for seq in range(3)]
    await asyncio.gather(*(store.submit(op) for op in ops))
    answers = await asyncio.gather(
        store.settle(end(ops[0])),
        store.settle(end(ops[1], checkpoint=a_checkpoint(), ledger=a_line(7, "2"))),
        store.settle(end(ops[2])),
        return_exceptions=True,
    )
    assert isinstance(answers[1], IdentityConflict)
    assert (answers[0], answers[2]) == (True, True)
    assert await store.unfinished_ops() == [ops[1]]
    assert await store.get_checkpoint(None, "r", "weights", "c") is None


@each_store
async def test_a_cancelled_wait_does_not_undo_the_call(store: Store) -> None:
    call = asyncio.create_task(store.submit(an_op()))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await store.unfinished_ops() == [an_op()]


# closing


@each_store
async def test_close_applies_what_was_queued_and_refuses_the_rest(store: Store) -> None:
    calls = [asyncio.create_task(store.submit(an_op(seq))) for seq in range(600)]
    await asyncio.sleep(0)
    await store.close()
    assert all(new for _, new in await asyncio.gather(*calls))
    with pytest.raises(RuntimeError):
        await store.get_op(None, "r:0")
    with pytest.raises(RuntimeError):
        await store.submit(an_op())
    await store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "gradserve-store"]


def test_before_open_nothing_is_answered() -> None:
    async def main() -> None:
        store = SqlStore.in_memory()
        with pytest.raises(RuntimeError):
            await store.get_run(None, "r")
        await store.close()

    asyncio.run(main())


# restart


def test_a_restart_keeps_everything(tmp_path: Path) -> None:
    async def fill(store: Store) -> list[object]:
        await store.create_session(a_session(tags=("a",)))
        await create_run(store)
        op = an_op(1)
        await store.submit(op)
        await store.settle(end(op, run=RunUpdate("r", 1, "w", "m", ((1, "g"),)), ledger=a_line(1, "0.5")))
        await store.submit(an_op(3))
        await store.reject(an_op(4), PROBLEM)
        await store.put_sampling_session(a_sampler())
        await store.join_sampling_session("acme", "p")
        await write_checkpoint(store, a_checkpoint())
        await write_line(store, a_line(2, "0.25"))
        return await everything(store)

    async def everything(store: Store) -> list[object]:
        return [
            await store.get_session("acme", "s"),
            await store.get_run("acme", "r"),
            [await store.get_op("acme", f"r:{seq}") for seq in range(5)],
            await store.unfinished_ops(),
            await store.get_sampling_session("acme", "p"),
            await store.list_checkpoints("acme", None, 10, 0),
            await store.ledger_lines("acme", None, 10, 0),
            await store.ledger_total("acme"),
            await store.live_digests(),
        ]

    kept: list[list[object]] = []

    async def first(store: Store) -> None:
        kept.append(await fill(store))

    async def again(store: Store) -> None:
        kept.append(await everything(store))
        assert await store.unfinished_ops() == [an_op(3)]
        assert await store.submit(an_op(3)) == (an_op(3), False)
        assert await store.join_sampling_session("acme", "p") == 2

    asyncio.run(on_store(SqlStore.at(tmp_path / "deep" / "er" / "x%20y #1?.db"), first))
    asyncio.run(on_store(SqlStore.at(tmp_path / "deep" / "er" / "x%20y #1?.db"), again))
    assert kept[0] == kept[1]


_WRITES_FOREVER = """
import asyncio, sys
from gradserve.store.base import Op, Settlement
from gradserve.store.sql import SqlStore

async def caller(store, k):
    for seq in range(10**9):
        op = Op(f"{k}:{seq}", "acme", "s", str(k), seq, "sample", body=f"body of {k}:{seq}".encode(), accepted_at=1.0)
        await store.submit(op)
        print("accepted", op.id, flush=True)
        if seq % 2:
            await store.settle(Settlement(op.id, "done", 2.0, result=b"result"))
            print("done", op.id, flush=True)

async def main():
    store = SqlStore.at(sys.argv[1])
    await store.open()
    await asyncio.gather(*(caller(store, k) for k in range(16)))

asyncio.run(main())
"""


def test_a_killed_process_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "gradserve.db"
    process = subprocess.Popen([sys.executable, "-c", _WRITES_FOREVER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(400)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.read().splitlines(keepends=True)
    process.stdout.close()
    process.wait()
    acknowledged = [line.split() for line in lines if line.endswith("\n")]
    assert len(acknowledged) >= 400

    async def check(store: Store) -> None:
        for word, op_id in acknowledged:
            op = await store.get_op("acme", op_id)
            assert op is not None
            assert op.body == f"body of {op_id}".encode()
            if word == "done":
                assert (op.state, op.result) == ("done", b"result")
        unfinished = {op.id for op in await store.unfinished_ops()}
        done = {op_id for word, op_id in acknowledged if word == "done"}
        even = {op_id for _, op_id in acknowledged if int(op_id.split(":")[1]) % 2 == 0}
        assert even <= unfinished
        assert not done & unfinished

    asyncio.run(on_store(SqlStore.at(path), check))


# a database that refuses


def test_a_full_disk_fails_the_calls_and_the_store_goes_on(tmp_path: Path) -> None:
    """SQLite gives up the whole transaction then: nobody in it may be told that it was written."""

    def small() -> Connection:
        connection = schema.open_file(tmp_path / "small.db")
        with connection.begin():
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages + 100}")
        return connection

    async def fill(store: Store) -> None:
        answers = await asyncio.gather(
            store.submit(an_op(0)),
            store.submit(an_op(1, body=bytes(2 << 20))),
            store.submit(an_op(2)),
            return_exceptions=True,
        )
        kept = {op.seq for op in await store.unfinished_ops()}
        assert isinstance(answers[1], StoreError)
        assert kept == {seq for seq, answer in enumerate(answers) if not isinstance(answer, BaseException)}
        assert await store.submit(an_op(3)) == (an_op(3), True)

    asyncio.run(on_store(SqlStore(small, lambda: 0.0), fill))


def test_errors_of_the_database_are_not_sqlalchemys() -> None:
    async def main() -> None:
        thread = CommitThread("gradserve-store")
        await thread.start(schema.open_memory)
        bad: Callable[[Connection], object] = lambda c: c.execute(sa.text("SELECT * FROM nowhere"))  # noqa: E731
        for writes in (True, False):
            with pytest.raises(StoreError, match="nowhere"):
                await thread.call(bad, writes=writes)
        # A transaction lost in the middle takes its calls with it, not the thread.
        with pytest.raises(StoreError):
            await thread.call(lambda c: c.exec_driver_sql("ROLLBACK"), writes=True)
        assert await thread.call(lambda c: c.execute(sa.text("SELECT 5")).scalar(), writes=True) == 5
        await thread.stop()

    asyncio.run(main())


def test_a_store_outlives_a_loop_that_went_away(tmp_path: Path) -> None:
    """Nobody closed it: the thread still finishes its work and another store finds it."""
    path = tmp_path / "gradserve.db"

    async def leave() -> None:
        store = SqlStore.at(path)
        await store.open()
        call = asyncio.create_task(store.submit(an_op()))
        await asyncio.sleep(0)
        call.cancel()

    async def look(store: Store) -> None:
        for _ in range(1000):
            if await store.unfinished_ops():
                return
            await asyncio.sleep(0.01)
        pytest.fail("the queued call was dropped")

    asyncio.run(leave())
    asyncio.run(on_store(SqlStore.at(path), look))


# looking without writing


def test_a_reader_beside_a_server_that_writes(tmp_path: Path) -> None:
    path = tmp_path / "gradserve.db"

    async def main() -> None:
        server, reader = SqlStore.at(path), SqlStore.at(path, read_only=True)
        await server.open()
        await server.submit(an_op(0))
        await reader.open()
        assert await reader.unfinished_ops() == [an_op(0)]
        await server.submit(an_op(1))
        assert await reader.unfinished_ops() == [an_op(0), an_op(1)]
        with pytest.raises(StoreError, match="readonly"):
            await reader.submit(an_op(2))
        await server.close()
        assert await reader.unfinished_ops() == [an_op(0), an_op(1)]
        await reader.close()

    asyncio.run(main())

    async def look(store: Store) -> None:
        assert await store.unfinished_ops() == [an_op(0), an_op(1)]

    asyncio.run(on_store(SqlStore.at(path, read_only=True), look))


def test_a_reader_without_a_database_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "nothing" / "gradserve.db"
    with pytest.raises(FileNotFoundError, match=r"gradserve up.*GRADSERVE_DATA_DIR"):
        asyncio.run(SqlStore.at(path, read_only=True).open())
    assert not path.parent.exists()
