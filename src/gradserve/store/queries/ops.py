"""The journal: Ops are written once and settled once."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from gradserve.store.base import IdentityConflict, Op, Run, Settlement
from gradserve.store.queries import checkpoints, history, ledger, runs, samplers, versions
from gradserve.store.queries.common import visible
from gradserve.store.tables import insert_if_new, op_bodies, ops, run_metrics
from gradserve.store.tables import versions as versions_table
from gradserve.wire.errors import Problem

_ANY_BODY = b""
"""The digest kept for a rejected Op: its replay is answered whatever the body."""

_EXPIRE_CHUNK = 500

_END = ("state", "ended_at", "result", "content_type", "problem", "weights", "version")
"""What a Settlement writes into the Op's own row."""

_INSERT = insert_if_new(ops)
_INSERT_BODY = sa.insert(op_bodies)


_NO_BODY = sa.literal(b"", sa.LargeBinary)


def _columns(body: sa.ColumnElement[Any]) -> list[sa.ColumnElement[Any]]:
    return [body if name == "body" else ops.c[name] for name in Op.__struct_fields__]


_WITH_BODY = ops.outerjoin(op_bodies, op_bodies.c.n == ops.c.n)
_SELECT = sa.select(*_columns(sa.func.coalesce(op_bodies.c.body, _NO_BODY))).select_from(_WITH_BODY)
_BY_ID = _SELECT.where(ops.c.id == bindparam("key"))
_OUTCOME_BY_ID = sa.select(*_columns(_NO_BODY)).where(ops.c.id == bindparam("key"))
_BY_IDENTITY = _SELECT.add_columns(ops.c.body_sha256).where(
    ops.c.scope == bindparam("key"), ops.c.seq == bindparam("at_seq")
)
_UNFINISHED = _SELECT.where(ops.c.state == "accepted").order_by(ops.c.accepted_at, ops.c.seq, ops.c.n)

_SETTLE = (
    sa.update(ops)
    .where(ops.c.id == bindparam("key"), ops.c.state == "accepted")
    .values({name: bindparam(f"new_{name}") for name in _END})
    .returning(ops.c.tenant, ops.c.scope, ops.c.seq, ops.c.kind)
)

_EXPIRABLE = (
    sa.select(ops.c.n)
    .where(ops.c.state.in_(("done", "failed", "rejected")), ops.c.ended_at < bindparam("ended_before"))
    .limit(_EXPIRE_CHUNK)
)
_EXPIRE = sa.update(ops).where(ops.c.n.in_(bindparam("numbers", expanding=True))).values(state="expired", result=None)
_DROP_BODIES = sa.delete(op_bodies).where(op_bodies.c.n.in_(bindparam("numbers", expanding=True)))

_TRAINING = _SELECT.where(
    ops.c.scope == bindparam("key"),
    ops.c.seq > bindparam("after"),
    ops.c.seq <= bindparam("last"),
    ops.c.kind != "sample",
    ops.c.state != "accepted",
).order_by(ops.c.seq)

_BATCHES = (
    sa.select(ops.c.body_sha256)
    .join(run_metrics, sa.and_(run_metrics.c.run_id == ops.c.scope, run_metrics.c.seq == ops.c.seq))
    .where(ops.c.scope == bindparam("key"), ops.c.seq <= bindparam("last"), ops.c.kind == "forward_backward")
    .order_by(ops.c.seq)
)

# A replay begins at a durable version, so what lies before one is not needed any more; nor is what changes nothing.
_COVERED = sa.exists().where(versions_table.c.run_id == ops.c.scope, versions_table.c.seq >= ops.c.seq)
_USELESS = sa.or_(ops.c.kind == "sample", ops.c.problem.is_not(None), _COVERED)
_DROPPABLE = (
    sa.select(ops.c.n)
    .join(op_bodies, op_bodies.c.n == ops.c.n)
    .where(ops.c.state == "expired", ops.c.ended_at < bindparam("ended_before"), _USELESS)
    .limit(_EXPIRE_CHUNK)
)


def submit(connection: Connection, op: Op, new_run: Run | None) -> tuple[Op, bool]:
    digest = hashlib.sha256(op.body).digest()
    if not _write(connection, op, digest):
        return _replayed(connection, op, digest), False
    if new_run is not None:
        runs.create(connection, new_run)
    _note_request(connection, op)
    return op, True


def reject(connection: Connection, op: Op, problem: Problem) -> Op:
    rejected = msgspec.structs.replace(op, state="rejected", ended_at=op.accepted_at, problem=problem)
    if not _write(connection, rejected, _ANY_BODY):
        return _stored(connection, op)[0]
    _advance(connection, op.tenant, op.scope, op.seq, op.kind)
    return rejected


def get(connection: Connection, tenant: str | None, op_id: str) -> Op | None:
    row = connection.execute(_BY_ID, {"key": op_id}).first()
    return visible(None if row is None else Op(*row), tenant)


def get_outcome(connection: Connection, tenant: str | None, op_id: str) -> Op | None:
    row = connection.execute(_OUTCOME_BY_ID, {"key": op_id}).first()
    return visible(None if row is None else Op(*row), tenant)


def unfinished(connection: Connection) -> list[Op]:
    return [Op(*row) for row in connection.execute(_UNFINISHED)]


def settle(connection: Connection, end: Settlement) -> bool:
    values = {f"new_{name}": getattr(end, name) for name in _END}
    op = connection.execute(_SETTLE, {"key": end.op_id, **values}).first()
    if op is None:
        return False
    if end.run is not None:
        runs.update(connection, op.tenant, end.run)
    if end.checkpoint is not None:
        checkpoints.put(connection, end.checkpoint)
    if end.sampling_session is not None:
        samplers.put(connection, end.sampling_session)
    if end.ledger is not None:
        ledger.append(connection, end.ledger)
    if end.durable is not None:
        versions.put(connection, end.durable)
    if end.metrics is not None:
        history.add_metrics(connection, end.metrics)
    if end.event is not None:
        history.add_event(connection, end.event)
    _advance(connection, op.tenant, op.scope, op.seq, op.kind)
    return True


def expire_some(connection: Connection, ended_before: float) -> int:
    """Expire a bounded number of Ops, so that others are served in between; 0 when none is left."""
    numbers = connection.execute(_EXPIRABLE, {"ended_before": ended_before}).scalars().all()
    if numbers:
        connection.execute(_EXPIRE, {"numbers": numbers})
    return len(numbers)


def drop_covered_bodies(connection: Connection, ended_before: float) -> int:
    """Delete a bounded number of bodies of expired Ops that no replay will need; 0 when none is left."""
    numbers = connection.execute(_DROPPABLE, {"ended_before": ended_before}).scalars().all()
    if numbers:
        connection.execute(_DROP_BODIES, {"numbers": numbers})
    return len(numbers)


def training(connection: Connection, run_id: str, after_seq: int, to_seq: int) -> list[Op]:
    rows = connection.execute(_TRAINING, {"key": run_id, "after": after_seq, "last": to_seq})
    return [Op(*row) for row in rows]


def data_digest(connection: Connection, run_id: str, to_seq: int) -> tuple[int, str]:
    total, count = hashlib.sha256(), 0
    for body in connection.execute(_BATCHES, {"key": run_id, "last": to_seq}).scalars():
        total.update(body)
        count += 1
    return count, total.hexdigest()


def _write(connection: Connection, op: Op, digest: bytes) -> bool:
    """False when the identity, or the id, is taken."""
    row = asdict(op)
    body = row.pop("body")
    number = connection.execute(_INSERT, {**row, "body_sha256": digest}).scalar()
    if number is None:
        return False
    if body:
        connection.execute(_INSERT_BODY, {"n": number, "body": body})
    return True


def _note_request(connection: Connection, op: Op) -> None:
    if op.kind == "sample":
        if op.run_id is not None:  # another tenant's, when its checkpoint is public: that one is left alone
            runs.touch(connection, op.tenant, op.run_id, op.accepted_at)
    elif not runs.touch(connection, op.tenant, op.scope, op.accepted_at):
        runs.refuse_foreign(connection, op.tenant, op.scope)


def _replayed(connection: Connection, op: Op, digest: bytes) -> Op:
    stored, stored_digest = _stored(connection, op)
    same = stored.kind == op.kind and stored_digest == digest
    if not same and stored_digest != _ANY_BODY:
        raise IdentityConflict(f"seq {op.seq} of {op.scope} was used before for another {stored.kind} request")
    return stored


def _stored(connection: Connection, op: Op) -> tuple[Op, bytes]:
    """The Op that holds the identity of ``op``, and its body's digest."""
    row = connection.execute(_BY_IDENTITY, {"key": op.scope, "at_seq": op.seq}).first()
    if row is None:
        raise IdentityConflict(f"op id {op.id} was used before with another identity")
    *values, digest = row
    stored = Op(*values)
    if stored.tenant != op.tenant:
        raise IdentityConflict(f"{op.scope} is not one of this tenant's")
    return stored, digest


def _advance(connection: Connection, tenant: str, scope: str, seq: int, kind: str) -> None:
    if kind != "sample":  # the scope of a sample is a sampling session, which has no cursor
        runs.advance(connection, tenant, scope, seq)
