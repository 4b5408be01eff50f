"""Sessions, runs, sampling sessions, checkpoints: what was put in comes back, to its tenant only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import msgspec
import pytest

from gradserve.store.base import IdentityConflict, Page, RunUpdate, Store
from gradserve.wire.ops import CreateModule, PutTrajectory, encode_body
from tests.contract.store_cases import (
    NOW,
    PROBLEM,
    a_checkpoint,
    a_line,
    a_run,
    a_sample_body,
    a_sampler,
    a_session,
    a_version,
    an_op,
    create_run,
    each_store,
    end,
    write_checkpoint,
    write_line,
)

# sessions


@each_store
async def test_a_session_comes_back_whole(store: Store) -> None:
    session = a_session(
        display_name="Zoë's", project_id="p1", tags=("a", "b"), user_metadata={"k": "v"}, finished="errored"
    )
    await store.create_session(session)
    await store.create_session(session)
    assert await store.get_session("acme", "s") == session
    with pytest.raises(IdentityConflict):
        await store.create_session(a_session(tenant="other"))


@each_store
async def test_touching_a_session(store: Store) -> None:
    await store.create_session(a_session())
    assert await store.touch_session("acme", "s", 9.5)
    assert not await store.touch_session("acme", "t", 9.5)
    assert await store.get_session("acme", "s") == a_session(last_seen_at=9.5)


@each_store
async def test_the_first_end_of_a_session_wins(store: Store) -> None:
    await store.create_session(a_session())
    assert await store.finish_session("acme", "s", "errored", "out of money")
    assert await store.finish_session("acme", "s", "success", None)
    assert not await store.finish_session("acme", "t", "success", None)
    assert await store.get_session("acme", "s") == a_session(finished="errored", finish_detail="out of money")


# pages


@each_store
async def test_pages_newest_first_without_gaps_or_overlaps(store: Store) -> None:
    for n in range(7):  # two at each moment: the later written counts as newer
        await store.create_session(a_session(f"s{n}", created_at=float(n // 2)))
        await create_run(store, f"r{n}", created_at=float(n // 2))
        await write_checkpoint(store, a_checkpoint(f"c{n}", created_at=float(n // 2)))
    newest = [6, 5, 4, 3, 2, 1, 0]
    for offset, limit in ((0, 3), (3, 3), (6, 3), (9, 3), (0, 100)):
        page, expected = Page(offset, limit, 7), newest[offset : offset + limit]
        sessions, page_of_sessions = await store.list_sessions("acme", limit, offset)
        runs, page_of_runs = await store.list_runs("acme", limit, offset)
        checkpoints, page_of_checkpoints = await store.list_checkpoints("acme", "r", limit, offset)
        assert [s.id for s in sessions] == [f"s{n}" for n in expected]
        assert [r.id for r in runs] == [f"r{n}" for n in expected]
        assert [c.name for c in checkpoints] == [f"c{n}" for n in expected]
        assert page_of_sessions == page_of_runs == page_of_checkpoints == page


@each_store
async def test_the_server_lists_the_rows_of_all_tenants(store: Store) -> None:
    for n, tenant in enumerate(("acme", "other")):
        await create_run(store, f"r{n}", tenant=tenant, created_at=float(n))
        await write_checkpoint(store, a_checkpoint(run_id=f"r{n}", tenant=tenant, created_at=float(n)))
    assert [run.id for run in (await store.list_runs(None, 10, 0))[0]] == ["r1", "r0"]
    assert [c.run_id for c in (await store.list_checkpoints(None, None, 10, 0))[0]] == ["r1", "r0"]
    assert [c.run_id for c in (await store.list_checkpoints(None, "r0", 10, 0))[0]] == ["r0"]
    assert [c.run_id for c in (await store.list_checkpoints("acme", None, 10, 0))[0]] == ["r0"]


@each_store
async def test_what_belongs_to_a_session(store: Store) -> None:
    for n in range(3):
        await create_run(store, f"r{n}", session_id="s" if n < 2 else "t")
        await store.put_sampling_session(a_sampler(f"p{n}", session_id="s" if n < 2 else "t"))
    assert [run.id for run in await store.runs_of_session("acme", "s")] == ["r0", "r1"]
    assert [p.id for p in await store.samplers_of_session("acme", "s")] == ["p0", "p1"]
    assert await store.runs_of_session("acme", "nothing") == []
    assert await store.samplers_of_session("acme", "nothing") == []


# sampling sessions


@each_store
async def test_a_sampling_session_is_put_once(store: Store) -> None:
    first = a_sampler(weights="w", run_id="r", run_version=3, model_path="tinker://r/weights/c")
    assert await store.put_sampling_session(first) == first
    await store.join_sampling_session("acme", "p")
    again = await store.put_sampling_session(msgspec.structs.replace(first, created_at=9.0))
    assert again == msgspec.structs.replace(first, clones=1)
    for other in ({"base": "b"}, {"weights": None}, {"model_path": None}, {"tenant": "other"}):
        with pytest.raises(IdentityConflict):
            await store.put_sampling_session(msgspec.structs.replace(first, **other))
    assert await store.get_sampling_session("acme", "p") == again


@each_store
async def test_everybody_who_joins_gets_a_number_of_their_own(store: Store) -> None:
    await store.put_sampling_session(a_sampler())
    numbers = await asyncio.gather(*(store.join_sampling_session("acme", "p") for _ in range(50)))
    assert sorted(n for n in numbers if n is not None) == list(range(1, 51))
    assert await store.join_sampling_session("acme", "nothing") is None


# checkpoints


@each_store
async def test_a_checkpoint_comes_back_whole(store: Store) -> None:
    checkpoint = a_checkpoint(expires_at=NOW + 5, public=True, user_metadata={"k": "v"}, moments=None)
    await write_checkpoint(store, checkpoint)
    assert await store.get_checkpoint("acme", "r", "weights", "c") == checkpoint
    assert await store.get_checkpoint("acme", "r", "sampler_weights", "c") is None
    assert await store.get_checkpoint("acme", "r", "weights", "d") is None


@each_store
async def test_a_checkpoint_of_no_op_is_put_once(store: Store) -> None:
    first = a_checkpoint(moments=None)
    assert await store.put_checkpoint(first) == first
    await store.set_checkpoint_public("acme", "r", "weights", "c", True)
    shown = a_checkpoint(moments=None, public=True)
    assert await store.put_checkpoint(a_checkpoint(moments=None, created_at=9.0)) == shown
    assert await store.get_checkpoint("acme", "r", "weights", "c") == shown
    assert first.weights in await store.live_digests()
    await store.set_checkpoint_ttl("acme", "r", "weights", "c", NOW - 1)
    assert await store.put_checkpoint(first) == first  # one that has expired makes room
    assert await store.get_checkpoint("acme", "r", "weights", "c") == first


@each_store
async def test_an_expired_checkpoint_is_gone_for_everybody(store: Store) -> None:
    await write_checkpoint(store, a_checkpoint("old", expires_at=NOW, public=True))
    await write_checkpoint(store, a_checkpoint("young", expires_at=NOW + 1))
    for tenant in ("acme", None):
        assert await store.get_checkpoint(tenant, "r", "weights", "old") is None
        assert await store.list_checkpoints(tenant, "r", 10, 0) == (
            [a_checkpoint("young", expires_at=NOW + 1)],
            Page(0, 10, 1),
        )
    assert not await store.set_checkpoint_ttl("acme", "r", "weights", "old", None)
    assert not await store.set_checkpoint_public("acme", "r", "weights", "old", False)
    assert not await store.delete_checkpoint("acme", "r", "weights", "old")


@each_store
async def test_the_time_to_live_can_be_set_and_taken_away(store: Store) -> None:
    await write_checkpoint(store, a_checkpoint())
    assert await store.set_checkpoint_ttl("acme", "r", "weights", "c", NOW + 1)
    assert await store.get_checkpoint("acme", "r", "weights", "c") == a_checkpoint(expires_at=NOW + 1)
    assert await store.set_checkpoint_ttl("acme", "r", "weights", "c", None)
    assert await store.get_checkpoint("acme", "r", "weights", "c") == a_checkpoint()
    assert await store.set_checkpoint_ttl("acme", "r", "weights", "c", NOW - 1)
    assert await store.get_checkpoint("acme", "r", "weights", "c") is None


@each_store
async def test_the_sweep_takes_those_whose_time_has_passed(store: Store) -> None:
    for name, expires_at in (("a", 5.0), ("b", 6.0), ("c", 7.0), ("d", None)):
        await write_checkpoint(store, a_checkpoint(name, expires_at=expires_at))
    assert [c.name for c in await store.sweep_checkpoints(6.0)] == ["a", "b"]
    assert await store.sweep_checkpoints(6.0) == []
    assert [c.name for c in await store.sweep_checkpoints(1e9)] == ["c"]
    assert (await store.list_checkpoints(None, None, 10, 0))[1].total == 1


@each_store
async def test_a_public_checkpoint_can_be_read_by_others_only_read(store: Store) -> None:
    await write_checkpoint(store, a_checkpoint())
    assert await store.get_checkpoint("other", "r", "weights", "c") is None
    assert await store.set_checkpoint_public("acme", "r", "weights", "c", True)
    shown = a_checkpoint(public=True)
    assert await store.get_checkpoint("other", "r", "weights", "c") == shown
    assert (await store.list_checkpoints("other", "r", 10, 0))[0] == []
    assert not await store.delete_checkpoint("other", "r", "weights", "c")
    assert not await store.set_checkpoint_ttl("other", "r", "weights", "c", 1.0)
    assert not await store.set_checkpoint_public("other", "r", "weights", "c", False)
    assert await store.set_checkpoint_public("acme", "r", "weights", "c", False)
    assert await store.get_checkpoint("other", "r", "weights", "c") is None


@each_store
async def test_a_checkpoint_is_deleted_once(store: Store) -> None:
    await write_checkpoint(store, a_checkpoint())
    assert await store.delete_checkpoint("acme", "r", "weights", "c")
    assert not await store.delete_checkpoint("acme", "r", "weights", "c")
    assert await store.get_checkpoint("acme", "r", "weights", "c") is None


# digests


@each_store
async def test_live_digests_are_all_that_anything_refers_to(store: Store) -> None:
    await create_run(store)
    op = an_op(1)
    await store.submit(op)
    await store.settle(end(op, run=RunUpdate("r", 1, "run-w", "run-m", ((1, "grad-1"), (2, "grad-2")))))
    await store.put_sampling_session(a_sampler("p1", weights="session-w"))
    await store.put_sampling_session(a_sampler("p2"))
    await write_checkpoint(store, a_checkpoint(weights="checkpoint-w", moments="checkpoint-m"))
    waiting = an_op(0, "p3", "sample", body=a_sample_body("sample-w"))
    ended = an_op(1, "p3", "sample", body=a_sample_body("ended-w"))
    for sample in (waiting, ended, an_op(2, "p3", "sample", body=a_sample_body(None))):
        await store.submit(sample)
    await store.settle(end(ended))
    everything = {
        "run-w",
        "run-m",
        "grad-1",
        "grad-2",
        "session-w",
        "checkpoint-w",
        "checkpoint-m",
        "sample-w",
    }
    assert await store.live_digests() == everything

    await store.settle(end(waiting))
    await store.delete_checkpoint("acme", "r", "weights", "c")
    assert await store.live_digests() == everything - {"sample-w", "checkpoint-w", "checkpoint-m"}


@each_store
async def test_what_clients_sent_as_objects_stays_as_long_as_a_replay_needs_it(store: Store) -> None:
    """A module's first weights, and trajectories, are in no row of the run once a step has replaced them."""
    run = (await create_run(store)).id
    sent = {
        1: an_op(1, run, "create_module", run_id=run, body=encode_body(CreateModule("g", "module-w"))),
        2: an_op(2, run, "put_trajectory", run_id=run, body=encode_body(PutTrajectory("first"))),
        3: an_op(3, run, "put_trajectory", run_id=run, body=encode_body(PutTrajectory("second"))),
    }
    for op in sent.values():
        await store.submit(op)
    assert await store.live_digests() >= {"module-w", "first", "second"}, "waiting for their turn"
    for op in sent.values():
        await store.settle(end(op))
    assert await store.live_digests() >= {"module-w", "first", "second"}, "done, and in no durable version yet"
    await store.put_version(a_version(run_id=run, seq=2, weights="v", moments=None))
    live = await store.live_digests()
    assert {"module-w", "second"} <= live
    assert "first" not in live, "the durable version contains it"


@each_store
async def test_a_finished_session_keeps_only_its_checkpoints(store: Store) -> None:
    await store.create_session(a_session())
    await create_run(store)
    op = an_op(1)
    await store.submit(op)
    await store.settle(end(op, run=RunUpdate("r", 1, "run-w", "run-m", ((1, "grad-1"),))))
    await store.put_sampling_session(a_sampler("p1", weights="session-w"))
    await write_checkpoint(store, a_checkpoint(weights="checkpoint-w", moments="checkpoint-m"))
    saved = {"checkpoint-w", "checkpoint-m"}
    assert await store.live_digests() == saved | {"run-w", "run-m", "grad-1", "session-w"}
    last = an_op(2)
    await store.submit(last)
    await store.finish_session("acme", "s", "success", None)
    assert await store.live_digests() == saved | {"run-w", "run-m", "grad-1"}, "a request is still on its way"
    await store.settle(end(last))
    assert await store.live_digests() == saved


# tenants


@each_store
async def test_another_tenants_rows_are_as_if_they_did_not_exist(store: Store) -> None:
    await store.create_session(a_session())
    await create_run(store)
    await store.put_sampling_session(a_sampler())
    await write_checkpoint(store, a_checkpoint())
    await write_line(store, a_line(1, "0.5"))
    attempts: list[tuple[Awaitable[object], object]] = [
        (store.get_session("other", "s"), None),
        (store.touch_session("other", "s", 9.0), False),
        (store.finish_session("other", "s", "success", None), False),
        (store.list_sessions("other", 10, 0), ([], Page(0, 10, 0))),
        (store.get_op("other", "r:0"), None),
        (store.get_run("other", "r"), None),
        (store.list_runs("other", 10, 0), ([], Page(0, 10, 0))),
        (store.runs_of_session("other", "s"), []),
        (store.get_sampling_session("other", "p"), None),
        (store.join_sampling_session("other", "p"), None),
        (store.samplers_of_session("other", "s"), []),
        (store.get_checkpoint("other", "r", "weights", "c"), None),
        (store.list_checkpoints("other", "r", 10, 0), ([], Page(0, 10, 0))),
        (store.delete_checkpoint("other", "r", "weights", "c"), False),
        (store.set_checkpoint_ttl("other", "r", "weights", "c", 1.0), False),
        (store.set_checkpoint_public("other", "r", "weights", "c", True), False),
        (store.ledger_lines("other", "r", 10, 0), ([], Page(0, 10, 0))),
    ]
    for attempt, nothing in attempts:
        assert await attempt == nothing
    assert (await store.ledger_total("other", "r")).lines == 0
    assert (await store.ledger_total("other", session_id="s")).lines == 0

    assert await store.get_session("acme", "s") == a_session()
    assert await store.get_sampling_session("acme", "p") == a_sampler()
    assert await store.get_checkpoint("acme", "r", "weights", "c") == a_checkpoint()
    assert await store.get_op("acme", "r:0") == await store.get_op(None, "r:0") is not None
    assert await store.get_run("acme", "r") == await store.get_run(None, "r") is not None
    assert await store.get_sampling_session(None, "p") == a_sampler()


@each_store
async def test_nobody_writes_into_another_tenants_run(store: Store) -> None:
    run = await create_run(store)
    theirs = an_op(0, kind="create_model", tenant="other", accepted_at=1.0)  # replays acme's op
    beyond = an_op(1, tenant="other")  # takes acme's next seq
    for op in (theirs, beyond):
        with pytest.raises(IdentityConflict):
            await store.submit(op)
        with pytest.raises(IdentityConflict):
            await store.reject(op, PROBLEM)
    with pytest.raises(IdentityConflict):
        await store.submit(an_op(0, "x", "create_model", tenant="other"), a_run("r", tenant="other"))
    assert await store.get_run(None, "r") == run
    assert (await store.submit(an_op(1)))[1]


@each_store
async def test_sampling_from_anothers_public_weights_leaves_no_trace_at_its_run(store: Store) -> None:
    run = await create_run(store)
    sample = an_op(0, "p", "sample", tenant="other", run_id="r", accepted_at=99.0)
    assert await store.submit(sample) == (sample, True)
    assert await store.settle(end(sample))
    assert await store.get_run(None, "r") == run
