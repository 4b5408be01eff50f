"""Checkpoints. One whose time has passed is gone for everybody, though its row waits for the sweep."""

from __future__ import annotations

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from gradserve.store.base import Checkpoint, Page
from gradserve.store.queries.common import matching, newest_first, page_of
from gradserve.store.tables import checkpoints, fields

_SELECT = sa.select(*fields(Checkpoint, checkpoints))
_NAMED = (
    checkpoints.c.run_id == bindparam("of_run"),
    checkpoints.c.kind == bindparam("of_kind"),
    checkpoints.c.name == bindparam("called"),
)


def _alive(now: sa.ColumnElement[float]) -> sa.ColumnElement[bool]:
    return sa.or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > now)


_NOW: sa.BindParameter[float] = bindparam("now", type_=sa.Double)
_OWN = (*_NAMED, checkpoints.c.tenant == bindparam("owner"), _alive(_NOW))
_BY_NAME = _SELECT.where(*_NAMED, _alive(_NOW))
_INSERT = sa.insert(checkpoints)
_REPLACE = sa.delete(checkpoints).where(*_NAMED)
_DELETE = sa.delete(checkpoints).where(*_OWN)
_SET_TTL = sa.update(checkpoints).where(*_OWN).values(expires_at=bindparam("until"))
_SET_PUBLIC = sa.update(checkpoints).where(*_OWN).values(public=bindparam("shown"))
_PASSED = checkpoints.c.expires_at <= _NOW
_EXPIRED = _SELECT.where(_PASSED).order_by(checkpoints.c.expires_at, checkpoints.c.n)
_SWEEP = sa.delete(checkpoints).where(_PASSED)


def put(connection: Connection, new: Checkpoint) -> None:
    """Replaces the one of that name: the caller has checked that it may."""
    connection.execute(_REPLACE, _name(new.run_id, new.kind, new.name))
    connection.execute(_INSERT, asdict(new))


def put_new(connection: Connection, now: float, new: Checkpoint) -> Checkpoint:
    """Unless there is one of that name which has not expired; the one that is there then."""
    existing = get(connection, now, new.tenant, new.run_id, new.kind, new.name)
    if existing is None:
        put(connection, new)
    return existing or new


def get(connection: Connection, now: float, tenant: str | None, run_id: str, kind: str, name: str) -> Checkpoint | None:
    row = connection.execute(_BY_NAME, {**_name(run_id, kind, name), "now": now}).first()
    if row is None:
        return None
    found = Checkpoint(*row)
    return found if found.public or tenant in (None, found.tenant) else None


def page(
    connection: Connection,
    now: float,
    tenant: str | None,
    run_id: str | None,
    limit: int,
    offset: int,
) -> tuple[list[Checkpoint], Page]:
    where = [*matching(checkpoints, tenant=tenant, run_id=run_id), _alive(sa.literal(now))]
    order = newest_first(checkpoints)
    return page_of(connection, Checkpoint, checkpoints, where, order, limit, offset)


def delete(connection: Connection, now: float, tenant: str, run_id: str, kind: str, name: str) -> bool:
    own = {**_name(run_id, kind, name), "owner": tenant, "now": now}
    return connection.execute(_DELETE, own).rowcount == 1


def set_ttl(
    connection: Connection,
    now: float,
    tenant: str,
    run_id: str,
    kind: str,
    name: str,
    until: float | None,
) -> bool:
    own = {**_name(run_id, kind, name), "owner": tenant, "now": now}
    return connection.execute(_SET_TTL, {**own, "until": until}).rowcount == 1


def set_public(
    connection: Connection,
    now: float,
    tenant: str,
    run_id: str,
    kind: str,
    name: str,
    public: bool,
) -> bool:
    own = {**_name(run_id, kind, name), "owner": tenant, "now": now}
    return connection.execute(_SET_PUBLIC, {**own, "shown": public}).rowcount == 1


def expiring(connection: Connection, until: float) -> list[Checkpoint]:
    return [Checkpoint(*row) for row in connection.execute(_EXPIRED, {"now": until})]


def sweep(connection: Connection, now: float) -> list[Checkpoint]:
    swept = [Checkpoint(*row) for row in connection.execute(_EXPIRED, {"now": now})]
    if swept:
        connection.execute(_SWEEP, {"now": now})
    return swept


def _name(run_id: str, kind: str, name: str) -> dict[str, str]:
    return {"of_run": run_id, "of_kind": kind, "called": name}
