"""What the store's tests share: every implementation, and small rows to put into it.

>>> @each_store
... async def test_something(store: Store) -> None: ...        # runs once per implementation
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gradserve.store.base import (
    Checkpoint,
    LedgerLine,
    Op,
    Run,
    RunUpdate,
    SamplingSession,
    Session,
    Settlement,
    Store,
    Version,
)
from gradserve.store.sql import SqlStore
from gradserve.wire.errors import Problem
from gradserve.wire.ops import LoraConfig, OpKind, Sample, SamplingParams, encode_body

NOW = 1000.0
"""What the clock of every store under test says."""

LORA = LoraConfig(rank=8, seed=3, train_mlp=False)
PROBLEM = Problem(status=400, code="bad_rows", title="Bad Request", detail="rows is empty", field="rows", index=2)

IMPLEMENTATIONS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: SqlStore.in_memory(now=lambda: NOW),
    "file": lambda folder: SqlStore.at(folder / "gradserve.db", now=lambda: NOW),
}


def each_store(test: Callable[[Store], Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on a fresh store of every implementation."""

    @pytest.mark.parametrize("place", IMPLEMENTATIONS)
    def run(place: str, tmp_path: Path) -> None:
        asyncio.run(on_store(IMPLEMENTATIONS[place](tmp_path), test))

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


async def on_store(store: Store, test: Callable[[Store], Awaitable[None]]) -> None:
    """Open, test, close."""
    await store.open()
    try:
        await test(store)
    finally:
        await store.close()


def a_session(name: str = "s", **other: Any) -> Session:
    return msgspec.structs.replace(Session(name, "acme", created_at=1.0, last_seen_at=1.0), **other)


def a_run(name: str = "r", **other: Any) -> Run:
    run = Run(name, "acme", "s", "tiny", LORA, created_at=1.0, last_request_at=1.0)
    return msgspec.structs.replace(run, **other)


def an_op(seq: int = 0, scope: str = "r", kind: OpKind = "forward_backward", **other: Any) -> Op:
    op = Op(f"{scope}:{seq}", "acme", "s", scope, seq, kind, body=f"body {seq}".encode(), accepted_at=10.0 + seq)
    return msgspec.structs.replace(op, **other)


def a_sampler(name: str = "p", **other: Any) -> SamplingSession:
    return msgspec.structs.replace(SamplingSession(name, "acme", "s", "tiny", created_at=1.0), **other)


def a_checkpoint(name: str = "c", **other: Any) -> Checkpoint:
    checkpoint = Checkpoint(
        run_id="r",
        tenant="acme",
        kind="weights",
        name=name,
        base="tiny",
        lora=LORA,
        version=1,
        weights="w1",
        moments="m1",
        size_bytes=1 << 33,
        created_at=1.0,
    )
    return msgspec.structs.replace(checkpoint, **other)


def a_version(**other: Any) -> Version:
    version = Version(
        run_id="r",
        tenant="acme",
        version=1,
        seq=2,
        weights="w1",
        moments="m1",
        cause="steps",
        size_bytes=1 << 33,
        created_at=1.0,
    )
    return msgspec.structs.replace(version, **other)


def a_line(seq: int = 0, amount: str = "0", **other: Any) -> LedgerLine:
    line = LedgerLine(
        id=f"line {seq}",
        op_id=f"r:{seq}",
        tenant="acme",
        kind="forward_backward",
        base="tiny",
        run_id="r",
        session_id="s",
        seq=seq,
        train_tokens=0,
        prefill_tokens=0,
        cached_tokens=0,
        sample_tokens=0,
        compute_ms=Decimal(0),
        amount_usd=Decimal(amount),
        price_version="v1",
        at=1.0,
    )
    return msgspec.structs.replace(line, **other)


def a_sample_body(weights: str | None) -> bytes:
    return encode_body(Sample("tiny", weights, b"\1\0\0\0", 1, SamplingParams(max_tokens=4, seed=1)))


def end(op: Op, **other: Any) -> Settlement:
    """The Op is done, with a result."""
    settlement = Settlement(op.id, "done", ended_at=50.0, result=b"\0ok", content_type="application/json")
    return msgspec.structs.replace(settlement, **other)


async def create_run(store: Store, name: str = "r", **other: Any) -> Run:
    """A run whose create_model (seq 0) is done: its cursor stands at 0."""
    run = a_run(name, **other)
    op = an_op(0, name, "create_model", tenant=run.tenant, accepted_at=run.created_at)
    await store.submit(op, run)
    await store.settle(end(op, run=RunUpdate(name, 0, "w0", None, ())))
    stored = await store.get_run(None, name)
    assert stored is not None
    return stored


async def write_line(store: Store, line: LedgerLine) -> None:
    """A ledger line, by way of an Op of a sampling session that ends with it."""
    op = an_op(line.seq, f"ledger of {line.tenant}", "sample", tenant=line.tenant, id=f"op of {line.id}")
    await store.submit(op)
    assert await store.settle(end(op, ledger=line))


async def write_checkpoint(store: Store, checkpoint: Checkpoint) -> None:
    """A checkpoint, by way of an Op that ends with it."""
    name = f"{checkpoint.path} at {checkpoint.created_at} {checkpoint.version}"
    op = an_op(0, name, "save_weights", tenant=checkpoint.tenant)
    await store.submit(op)
    assert await store.settle(end(op, checkpoint=checkpoint))


async def cursor_of(store: Store, run_id: str = "r") -> int:
    run = await store.get_run(None, run_id)
    assert run is not None
    return run.cursor
