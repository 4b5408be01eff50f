"""Sampling sessions."""

from __future__ import annotations

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from gradserve.store.base import IdentityConflict, SamplingSession
from gradserve.store.queries.common import visible
from gradserve.store.tables import fields, insert_if_new, sampling_sessions

_INSERT = insert_if_new(sampling_sessions)
_SELECT = sa.select(*fields(SamplingSession, sampling_sessions))
_BY_ID = _SELECT.where(sampling_sessions.c.id == bindparam("key"))
_OF_SESSION = _SELECT.where(
    sampling_sessions.c.session_id == bindparam("session"),
    sampling_sessions.c.tenant == bindparam("owner"),
).order_by(sampling_sessions.c.n)
_JOIN = (
    sa.update(sampling_sessions)
    .where(
        sampling_sessions.c.id == bindparam("key"),
        sampling_sessions.c.tenant == bindparam("owner"),
    )
    .values(clones=sampling_sessions.c.clones + 1)
    .returning(sampling_sessions.c.clones)
)


def put(connection: Connection, session: SamplingSession) -> SamplingSession:
    """The stored row. Raises IdentityConflict when it is another one."""
    if connection.execute(_INSERT, asdict(session)).scalar() is not None:
        return session
    stored = _find(connection, session.id)
    if stored is None or _identity(stored) != _identity(session):
        raise IdentityConflict(f"sampling session {session.id} exists with other weights")
    return stored


def get(connection: Connection, tenant: str | None, session_id: str) -> SamplingSession | None:
    return visible(_find(connection, session_id), tenant)


def join(connection: Connection, tenant: str, session_id: str) -> int | None:
    return connection.execute(_JOIN, {"key": session_id, "owner": tenant}).scalar()


def of_session(connection: Connection, tenant: str, session_id: str) -> list[SamplingSession]:
    rows = connection.execute(_OF_SESSION, {"session": session_id, "owner": tenant})
    return [SamplingSession(*row) for row in rows]


def _find(connection: Connection, session_id: str) -> SamplingSession | None:
    row = connection.execute(_BY_ID, {"key": session_id}).first()
    return None if row is None else SamplingSession(*row)


def _identity(session: SamplingSession) -> tuple[str | None, ...]:
    return session.tenant, session.base, session.weights, session.model_path
