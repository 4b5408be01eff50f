"""Runs, and their cursors over the journal."""

from __future__ import annotations

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from gradserve.store.base import IdentityConflict, Page, Run, RunUpdate, Session
from gradserve.store.queries import sessions
from gradserve.store.queries.common import matching, newest_first, page_of, visible
from gradserve.store.tables import fields, insert_if_new, ops, runs

_INSERT = insert_if_new(runs)
_SELECT = sa.select(*fields(Run, runs))
_BY_ID = _SELECT.where(runs.c.id == bindparam("key"))
_OWN = (runs.c.id == bindparam("key"), runs.c.tenant == bindparam("owner"))
_OF_SESSION = _SELECT.where(runs.c.session_id == bindparam("session"), runs.c.tenant == bindparam("owner")).order_by(
    runs.c.n
)

_TOUCH = sa.update(runs).where(*_OWN).values(last_request_at=bindparam("at"))
_UPDATE = (
    sa.update(runs)
    .where(*_OWN)
    .values({name: bindparam(f"new_{name}") for name in ("version", "weights", "moments", "gradients", "corrupted")})
)
_SET_CLIENT_STATE = sa.update(runs).where(*_OWN).values(client_state=bindparam("digest"))
_CURSOR = sa.select(runs.c.tenant, runs.c.cursor).where(runs.c.id == bindparam("key"))
_AHEAD = (
    sa.select(ops.c.seq, ops.c.state)
    .where(ops.c.scope == bindparam("key"), ops.c.seq > bindparam("cursor"))
    .order_by(ops.c.seq)
)
_NEXT_ENDED = sa.exists().where(
    ops.c.scope == bindparam("key"), ops.c.seq == bindparam("to") + 1, ops.c.state != "accepted"
)
_STEP_CURSOR = (
    sa.update(runs)
    .where(*_OWN, runs.c.cursor == bindparam("to") - 1, ~_NEXT_ENDED)
    .values(cursor=bindparam("to", type_=sa.BigInteger))
)
_SET_CURSOR = sa.update(runs).where(runs.c.id == bindparam("key")).values(cursor=bindparam("to"))


def create(connection: Connection, run: Run) -> None:
    """Raises IdentityConflict when the id is taken."""
    if connection.execute(_INSERT, asdict(run)).scalar() is None:
        raise IdentityConflict(f"run {run.id} exists already")


def get(connection: Connection, tenant: str | None, run_id: str) -> Run | None:
    row = connection.execute(_BY_ID, {"key": run_id}).first()
    return visible(None if row is None else Run(*row), tenant)


def get_with_session(connection: Connection, tenant: str, run_id: str) -> tuple[Run, Session | None] | None:
    run = get(connection, tenant, run_id)
    return None if run is None else (run, sessions.get(connection, tenant, run.session_id))


def page(connection: Connection, tenant: str | None, limit: int, offset: int) -> tuple[list[Run], Page]:
    where = matching(runs, tenant=tenant)
    return page_of(connection, Run, runs, where, newest_first(runs), limit, offset)


def of_session(connection: Connection, tenant: str, session_id: str) -> list[Run]:
    rows = connection.execute(_OF_SESSION, {"session": session_id, "owner": tenant})
    return [Run(*row) for row in rows]


def touch(connection: Connection, tenant: str, run_id: str, at: float) -> bool:
    """Note a request; False when the tenant has no such run."""
    return connection.execute(_TOUCH, {"key": run_id, "owner": tenant, "at": at}).rowcount == 1


def refuse_foreign(connection: Connection, tenant: str, run_id: str) -> None:
    """Raises IdentityConflict when the run is another tenant's (not when there is no such run)."""
    run = connection.execute(_CURSOR, {"key": run_id}).first()
    if run is not None and run.tenant != tenant:
        raise _foreign(run_id)


def update(connection: Connection, tenant: str, new: RunUpdate) -> None:
    """Raises IdentityConflict when there is no such run of the tenant: its new weights must not get lost."""
    values = {f"new_{name}": value for name, value in asdict(new).items() if name != "id"}
    updated = connection.execute(_UPDATE, {"key": new.id, "owner": tenant, **values})
    if updated.rowcount == 0:
        raise _foreign(new.id)


def set_client_state(connection: Connection, tenant: str, run_id: str, digest: str | None) -> bool:
    return connection.execute(_SET_CLIENT_STATE, {"key": run_id, "owner": tenant, "digest": digest}).rowcount == 1


def advance(connection: Connection, tenant: str, run_id: str, ended_seq: int) -> None:
    """Move the cursor over all consecutive ended Ops, now that the one at ``ended_seq`` ended.

    Raises IdentityConflict when the run is another tenant's; a run that was never created has no cursor.
    """
    # Nearly always it is the next one and those after it have not ended: one statement instead of three.
    if connection.execute(_STEP_CURSOR, {"key": run_id, "owner": tenant, "to": ended_seq}).rowcount == 1:
        return
    run = connection.execute(_CURSOR, {"key": run_id}).first()
    if run is None:
        return
    if run.tenant != tenant:
        raise _foreign(run_id)
    if ended_seq != run.cursor + 1:
        return
    cursor = run.cursor
    with connection.execute(_AHEAD, {"key": run_id, "cursor": cursor}) as ahead:
        for seq, state in ahead:
            if seq != cursor + 1 or state == "accepted":
                break
            cursor = seq
    connection.execute(_SET_CURSOR, {"key": run_id, "to": cursor})


def _foreign(run_id: str) -> IdentityConflict:
    return IdentityConflict(f"run {run_id} is not one of this tenant's")
