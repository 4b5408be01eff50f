"""Durable versions, metrics, events, and whose database it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gradserve.store.base import Event, Fenced, Metrics, RunUpdate, Session, Store
from gradserve.store.sql import SqlStore
from tests.contract.store_cases import a_version, an_op, create_run, each_store, end, on_store


@each_store
async def test_versions_are_listed_newest_first_and_keep_their_arrays_alive(store: Store) -> None:
    await create_run(store)
    first, second = a_version(), a_version(version=2, seq=5, weights="w2", moments=None)
    await store.put_version(first)
    await store.put_version(second)
    assert await store.list_versions("acme", "r") == [second, first]
    assert await store.list_versions("other", "r") == []
    assert {"w1", "m1", "w2"} <= await store.live_digests()


@each_store
async def test_of_each_run_the_newest_are_retained(store: Store) -> None:
    await create_run(store)
    made = [a_version(version=n, seq=n, run_id=run) for n in range(4) for run in ("r", "q")]
    for version in made:
        await store.put_version(version)
    dropped = await store.retain_versions(2, 0.0)
    assert [(v.run_id, v.version) for v in dropped] == [("r", 0), ("q", 0), ("r", 1), ("q", 1)]
    assert [v.version for v in await store.list_versions(None, "q")] == [3, 2]
    assert await store.retain_versions(2, 0.0) == []


@each_store
async def test_versions_of_a_finished_session_go_with_time(store: Store) -> None:
    await store.create_session(Session("s", "acme", 1.0, 1.0))
    await create_run(store)
    await store.put_version(a_version(created_at=5.0))
    assert await store.retain_versions(9, 1e9) == [], "its session goes on"
    assert await store.finish_session("acme", "s", "completed", None)
    assert await store.retain_versions(9, 5.0) == []
    assert await store.retain_versions(9, 6.0) == [a_version(created_at=5.0)]


@each_store
async def test_a_settlement_writes_version_metrics_and_event_with_the_rest_or_not_at_all(store: Store) -> None:
    await create_run(store)
    op = an_op(1)
    await store.submit(op)
    metrics = Metrics("r", "acme", 1, 1, "optim_step", 50.0, {"grad_norm": 0.5})
    event = Event(50.0, "loaded", "from somewhere", "acme", "r", 1)
    settlement = msgspec.structs.replace(end(op), durable=a_version(), metrics=metrics, event=event)
    assert await store.settle(settlement)
    assert not await store.settle(settlement), "a second time writes nothing"
    assert await store.list_versions(None, "r") == [a_version()]
    assert (await store.list_metrics("acme", "r", 9, 0))[0] == [metrics]
    assert (await store.list_events("acme", "r", 9, 0))[0] == [event]


@each_store
async def test_events_are_seen_by_their_tenant_and_the_servers_own_by_all(store: Store) -> None:
    own = Event(1.0, "storage_alarm", "the disk is full")
    hers = Event(2.0, "recovered", "2 steps", "acme", "r", 3)
    for event in (own, hers):
        await store.add_event(event)
    assert (await store.list_events("acme", None, 9, 0))[0] == [hers, own]
    assert (await store.list_events("other", None, 9, 0))[0] == [own]
    assert (await store.list_events("other", "r", 9, 0))[0] == []


@each_store
async def test_a_restored_run_has_its_state_version_and_event(store: Store) -> None:
    await create_run(store)
    event = Event(3.0, "rolled_back", "to step 1", "acme", "r")
    await store.restore("acme", RunUpdate("r", 1, "w1", "m1", ()), a_version(cause="rollback"), event)
    run = await store.get_run(None, "r")
    assert run is not None
    assert (run.version, run.weights, run.moments) == (1, "w1", "m1")
    assert await store.list_versions(None, "r") == [a_version(cause="rollback")]
    assert (await store.list_events(None, "r", 9, 0))[0] == [event]


@each_store
async def test_the_clients_own_state_belongs_to_the_run(store: Store) -> None:
    await create_run(store)
    assert await store.set_client_state("acme", "r", "digest")
    assert not await store.set_client_state("other", "r", "theirs")
    run = await store.get_run("acme", "r")
    assert run is not None
    assert run.client_state == "digest"
    assert "digest" in await store.live_digests()


def test_a_server_that_was_taken_over_writes_nothing_any_more(tmp_path: Path) -> None:
    """The first server is only asleep (a stopped process, a partition): its writes come after the second has begun."""
    path = tmp_path / "gradserve.db"

    async def use(first: Store) -> None:
        await create_run(first)
        second = SqlStore.at(path)
        await second.open()
        try:
            for write in (
                lambda: first.submit(an_op(1)),
                lambda: first.expire_results(1e9),
                lambda: first.put_version(a_version()),
            ):
                with pytest.raises(Fenced, match="taken this data directory over"):
                    await write()
            assert await first.get_op(None, "r:1") is None
            assert (await first.is_ours(), await second.is_ours()) == (False, True)
            assert await second.submit(an_op(1)) == (an_op(1), True)
            assert await second.list_versions(None, "r") == []
        finally:
            await second.close()

    asyncio.run(on_store(SqlStore.at(path), use))
