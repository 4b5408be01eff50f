"""The journal: an Op is written once under its identity and settled once, and the cursor follows."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from gradserve.store.base import IdentityConflict, RunUpdate, Settlement, Store
from tests.contract.store_cases import (
    PROBLEM,
    a_checkpoint,
    a_line,
    a_run,
    a_sampler,
    a_version,
    an_op,
    create_run,
    cursor_of,
    each_store,
    end,
    write_line,
)

# submit


@each_store
async def test_a_new_op_is_written_with_the_run_it_creates(store: Store) -> None:
    op = an_op(0, kind="create_model", body=b"\0\xff" * 3, run_id="r", price_version="v7")
    run = a_run(user_metadata={"a": "ü"}, last_request_at=10.0)
    assert await store.submit(op, run) == (op, True)
    assert await store.get_op("acme", op.id) == op
    assert await store.get_outcome("acme", op.id) == msgspec.structs.replace(op, body=b"")
    assert await store.get_outcome("other", op.id) is None
    assert await store.get_run("acme", "r") == run


@each_store
async def test_replay_returns_the_op_as_it_is_now(store: Store) -> None:
    op = an_op()
    await store.submit(op)
    assert await store.submit(msgspec.structs.replace(op, accepted_at=99.0)) == (op, False)

    await store.settle(end(op))
    done = await store.get_op("acme", op.id)
    assert done is not None
    assert done.state == "done"
    assert await store.submit(op) == (done, False)

    await store.expire_results(51.0)
    expired = msgspec.structs.replace(done, state="expired", result=None)
    assert await store.submit(op) == (expired, False)


@each_store
async def test_another_body_under_the_same_identity_is_refused(store: Store) -> None:
    op = an_op()
    other = msgspec.structs.replace(op, body=b"other")
    await store.submit(op)
    with pytest.raises(IdentityConflict):
        await store.submit(other)
    with pytest.raises(IdentityConflict):
        await store.submit(msgspec.structs.replace(op, kind="optim_step"))
    await store.settle(end(op))
    await store.expire_results(51.0)
    with pytest.raises(IdentityConflict):
        await store.submit(other)


@each_store
async def test_identities_are_per_scope(store: Store) -> None:
    assert (await store.submit(an_op(1, "r")))[1]
    assert (await store.submit(an_op(1, "q", body=b"other")))[1]


@each_store
async def test_an_op_id_names_one_identity(store: Store) -> None:
    await store.submit(an_op(1, id="x"))
    with pytest.raises(IdentityConflict):
        await store.submit(an_op(2, id="x"))
    with pytest.raises(IdentityConflict):
        await store.reject(an_op(2, id="x"), PROBLEM)
    assert (await store.submit(an_op(2)))[1]


@each_store
async def test_an_op_is_not_written_without_its_run(store: Store) -> None:
    await store.submit(an_op(0, kind="create_model"), a_run())
    other = an_op(0, "elsewhere", "create_model")
    with pytest.raises(IdentityConflict):
        await store.submit(other, a_run(base="other"))
    assert await store.get_op(None, other.id) is None
    assert await store.get_run(None, "r") == a_run(last_request_at=10.0)


@each_store
async def test_of_many_equal_requests_at_once_one_is_new(store: Store) -> None:
    answers = await asyncio.gather(*(store.submit(an_op()) for _ in range(50)))
    assert [op for op, _ in answers] == [an_op()] * 50
    assert sorted(new for _, new in answers) == [False] * 49 + [True]


@each_store
async def test_large_and_empty_bodies_and_results_come_back(store: Store) -> None:
    large = random.Random(1).randbytes(3 << 20)
    for seq, data in enumerate((large, b"")):
        await store.submit(an_op(seq, body=data))
        await store.settle(end(an_op(seq), result=data))
        op = await store.get_op("acme", f"r:{seq}")
        assert op is not None
        assert (op.body, op.result) == (data, data)


@each_store
async def test_a_request_is_noted_at_its_run(store: Store) -> None:
    await create_run(store)
    await store.submit(an_op(1, accepted_at=77.0))
    await store.submit(an_op(1, accepted_at=88.0))  # a replay is not a request
    run = await store.get_run("acme", "r")
    assert run is not None
    assert run.last_request_at == 77.0
    await store.submit(an_op(0, "p", "sample", run_id="r", accepted_at=99.0))
    run = await store.get_run("acme", "r")
    assert run is not None
    assert (run.last_request_at, run.cursor) == (99.0, 0)


# reject


@each_store
async def test_a_rejected_op_keeps_its_seq_and_says_why(store: Store) -> None:
    op = an_op(1)
    rejected = await store.reject(op, PROBLEM)
    assert rejected == msgspec.structs.replace(op, state="rejected", problem=PROBLEM, ended_at=op.accepted_at)
    assert await store.get_op("acme", op.id) == rejected
    assert await store.unfinished_ops() == []


@each_store
async def test_a_rejected_op_is_returned_whatever_is_sent(store: Store) -> None:
    rejected = await store.reject(an_op(1), PROBLEM)
    other = an_op(1, body=b"mended", kind="optim_step")
    assert await store.submit(other) == (rejected, False)
    assert await store.reject(other, msgspec.structs.replace(PROBLEM, code="other")) == rejected
    await store.expire_results(1e9)
    stored, new = await store.submit(other)
    assert (stored.id, stored.state, new) == (rejected.id, "expired", False)


@each_store
async def test_rejecting_a_stored_op_changes_nothing(store: Store) -> None:
    op = an_op(1)
    await store.submit(op)
    assert await store.reject(an_op(1, body=b"other"), PROBLEM) == op
    assert await store.unfinished_ops() == [op]


# settle


@each_store
async def test_a_settlement_writes_everything(store: Store) -> None:
    await create_run(store)
    op = an_op(1, kind="save_weights")
    await store.submit(op)
    update = RunUpdate("r", 7, "w7", "m7", ((1, "g1"), (2, "g2")), corrupted=True)
    ends = end(op, run=update, checkpoint=a_checkpoint(), sampling_session=a_sampler(), ledger=a_line(1))
    ends = msgspec.structs.replace(ends, weights="w6", version=6)
    assert await store.settle(ends)

    stored = await store.get_op("acme", op.id)
    assert stored == msgspec.structs.replace(
        op, state="done", ended_at=50.0, result=b"\0ok", content_type="application/json", weights="w6", version=6
    )
    run = await store.get_run("acme", "r")
    assert run == a_run(
        version=7,
        weights="w7",
        moments="m7",
        gradients=((1, "g1"), (2, "g2")),
        corrupted=True,
        cursor=1,
        last_request_at=op.accepted_at,
    )
    assert await store.get_checkpoint("acme", "r", "weights", "c") == a_checkpoint()
    assert await store.get_sampling_session("acme", "p") == a_sampler()
    assert (await store.ledger_lines("acme", "r", 10, 0))[0] == [a_line(1)]


@each_store
async def test_an_op_fails_with_its_problem(store: Store) -> None:
    op = an_op(1)
    await store.submit(op)
    assert await store.settle(end(op, state="failed", result=None, content_type=None, problem=PROBLEM))
    failed = await store.get_op("acme", op.id)
    assert failed == msgspec.structs.replace(op, state="failed", ended_at=50.0, problem=PROBLEM)


@each_store
async def test_a_second_settlement_writes_nothing(store: Store) -> None:
    await create_run(store)
    op = an_op(1)
    await store.submit(op)
    assert await store.settle(end(op, ledger=a_line(1, "0.5")))
    before = await store.get_op(None, op.id), await store.get_run(None, "r")
    late = end(
        op,
        state="failed",
        result=b"late",
        run=RunUpdate("r", 9, "late", None, ()),
        checkpoint=a_checkpoint(),
        sampling_session=a_sampler(),
        ledger=a_line(2, "0.5"),
    )
    assert not await store.settle(late)
    assert (await store.get_op(None, op.id), await store.get_run(None, "r")) == before
    assert await store.get_checkpoint(None, "r", "weights", "c") is None
    assert await store.get_sampling_session(None, "p") is None
    assert (await store.ledger_total(None)).lines == 1


@each_store
async def test_rejected_expired_and_unknown_ops_are_not_settled(store: Store) -> None:
    await store.reject(an_op(1), PROBLEM)
    assert not await store.settle(end(an_op(1)))
    await store.expire_results(1e9)
    assert not await store.settle(end(an_op(1)))
    assert not await store.settle(end(an_op(2)))


@each_store
async def test_a_settlement_that_cannot_be_written_whole_is_not_written_at_all(store: Store) -> None:
    await create_run(store)
    await create_run(store, "foreign", tenant="other")
    await write_line(store, a_line(1, "0.25"))
    await store.put_sampling_session(a_sampler(weights="w"))
    op = an_op(1)
    await store.submit(op)
    before = await store.get_run(None, "r")
    good = end(op, run=RunUpdate("r", 1, "w1", "m1", ()), checkpoint=a_checkpoint())
    bad_parts: list[dict[str, Any]] = [
        {"ledger": a_line(1, "0.26")},
        {"sampling_session": a_sampler(weights="other")},
        {"run": RunUpdate("foreign", 1, "w1", "m1", ())},
        {"run": RunUpdate("nobody's", 1, "w1", "m1", ())},
    ]
    for bad in bad_parts:
        with pytest.raises(IdentityConflict):
            await store.settle(msgspec.structs.replace(good, **bad))
        assert await store.get_op(None, op.id) == op
        assert await store.get_run(None, "r") == before
        assert await store.get_checkpoint(None, "r", "weights", "c") is None
        assert (await store.ledger_total(None)).lines == 1
    assert await store.settle(good)


@each_store
async def test_a_ledger_line_that_is_there_already_is_not_written_twice(store: Store) -> None:
    await write_line(store, a_line(1, "0.25"))
    op = an_op(1)
    await store.submit(op)
    assert await store.settle(end(op, ledger=a_line(1, "0.25")))
    assert (await store.ledger_total(None)).lines == 1


@each_store
async def test_a_checkpoint_replaces_its_namesake(store: Store) -> None:
    for seq, weights in enumerate(("w1", "w2")):
        await store.submit(an_op(seq))
        await store.settle(end(an_op(seq), checkpoint=a_checkpoint(weights=weights)))
    assert (await store.list_checkpoints("acme", "r", 10, 0))[0] == [a_checkpoint(weights="w2")]


# the cursor


@each_store
async def test_the_cursor_waits_for_gaps_and_passes_rejects(store: Store) -> None:
    await store.submit(an_op(0, kind="create_model"), a_run())
    assert await cursor_of(store) == -1
    await store.submit(an_op(3))
    await store.settle(end(an_op(3)))
    assert await cursor_of(store) == -1
    await store.settle(end(an_op(0)))
    assert await cursor_of(store) == 0
    await store.reject(an_op(2), PROBLEM)
    assert await cursor_of(store) == 0
    await store.submit(an_op(1))
    assert await cursor_of(store) == 0
    await store.settle(end(an_op(1), state="failed"))
    assert await cursor_of(store) == 3
    await store.reject(an_op(4), PROBLEM)
    assert await cursor_of(store) == 4


@each_store
async def test_the_cursor_passes_expired_ops(store: Store) -> None:
    await store.submit(an_op(0), a_run())
    await store.reject(an_op(1), PROBLEM)
    await store.expire_results(1e9)
    await store.settle(end(an_op(0)))
    assert await cursor_of(store) == 1


@each_store
async def test_the_cursor_is_right_in_any_order(store: Store) -> None:
    """Against the definition, after each step: some Ops wait in the journal first, some arrive late."""
    for case in range(20):
        dice = random.Random(case)
        name = f"run {case}"
        ops = [an_op(seq, name) for seq in range(10)]
        await store.submit(ops[0], a_run(name))
        waiting = {0, *dice.sample(range(1, 10), 5)}
        await asyncio.gather(*(store.submit(ops[seq]) for seq in waiting))
        ended: set[int] = set()
        for op in dice.sample(ops, 10):
            if op.seq not in waiting and dice.random() < 0.5:
                await store.reject(op, PROBLEM)
            else:
                await store.submit(op)
                await store.settle(end(op, state=dice.choice(("done", "failed"))))
            ended.add(op.seq)
            expected = next(n for n in range(11) if n not in ended) - 1
            assert await cursor_of(store, name) == expected


# after a crash, and expiry


@each_store
async def test_unfinished_ops_of_all_tenants_in_the_order_to_run_them(store: Store) -> None:
    first = an_op(5, "a", accepted_at=1.0, tenant="other")
    second = an_op(1, "b", "sample", accepted_at=2.0)
    third = an_op(2, "b", accepted_at=2.0)
    ended = an_op(3, "b", accepted_at=0.0)
    for op in (third, ended, second, first):
        await store.submit(op)
    await store.settle(end(ended))
    await store.reject(an_op(9, "b"), PROBLEM)
    assert await store.unfinished_ops() == [first, second, third]


@each_store
async def test_results_expire_by_when_they_ended(store: Store) -> None:
    for seq, ended_at in enumerate((5.0, 6.0, 7.0)):
        await store.submit(an_op(seq))
        await store.settle(end(an_op(seq), ended_at=ended_at))
    await store.submit(an_op(3))
    assert await store.expire_results(6.0) == 1
    assert await store.expire_results(6.0) == 0
    old, edge = await store.get_op(None, "r:0"), await store.get_op(None, "r:1")
    assert old is not None
    assert edge is not None
    assert (old.state, old.body, old.result, old.ended_at) == ("expired", b"body 0", None, 5.0)
    assert (edge.state, edge.body, edge.result) == ("done", b"body 1", b"\0ok")
    assert await store.expire_results(1e9) == 2
    assert await store.unfinished_ops() == [an_op(3)]


@each_store
async def test_bodies_are_kept_until_a_durable_version_covers_them(store: Store) -> None:
    """They are what a replay runs again; a failed Op and a sample change no weights, so theirs go with the result."""
    await create_run(store)
    sample = msgspec.structs.replace(an_op(1), id="s:1", scope="s", kind="sample")
    for op in (an_op(1), an_op(2), an_op(3), sample):
        await store.submit(op)
    for op in (an_op(1), an_op(3), sample):
        await store.settle(end(op, ended_at=5.0))
    await store.settle(Settlement("r:2", "failed", 5.0, problem=PROBLEM))

    async def bodies() -> dict[str, bool]:
        found = [await store.get_op(None, key) for key in ("r:1", "r:2", "r:3", "s:1")]
        return {op.id: bool(op.body) for op in found if op is not None}

    await store.expire_results(1e9)
    assert await bodies() == {"r:1": True, "r:2": False, "r:3": True, "s:1": False}
    await store.put_version(a_version(seq=2))
    await store.expire_results(1e9)
    assert await bodies() == {"r:1": False, "r:2": False, "r:3": True, "s:1": False}
    assert [op.seq for op in await store.training_ops("r", 2, 9)] == [3]


@each_store
async def test_any_number_of_results_expires(store: Store) -> None:
    await asyncio.gather(*(store.reject(an_op(seq), PROBLEM) for seq in range(1201)))
    assert await store.expire_results(1e9) == 1201
