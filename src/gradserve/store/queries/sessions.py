"""Sessions."""

from __future__ import annotations

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from gradserve.store.base import IdentityConflict, Page, Session
from gradserve.store.queries.common import matching, newest_first, page_of, visible
from gradserve.store.tables import fields, insert_if_new, sessions

_INSERT = insert_if_new(sessions)
_BY_ID = sa.select(*fields(Session, sessions)).where(sessions.c.id == bindparam("key"))
_OWN = (sessions.c.id == bindparam("key"), sessions.c.tenant == bindparam("owner"))
_TOUCH = sa.update(sessions).where(*_OWN).values(last_seen_at=bindparam("at"))
_FINISH = (
    sa.update(sessions)
    .where(*_OWN, sessions.c.finished.is_(None))
    .values(finished=bindparam("how"), finish_detail=bindparam("detail"))
)


def create(connection: Connection, session: Session) -> None:
    """Raises IdentityConflict when the id is taken by another session."""
    if connection.execute(_INSERT, asdict(session)).scalar() is None:
        stored = _find(connection, session.id)
        if stored != session:
            raise IdentityConflict(f"session {session.id} exists with other contents")


def get(connection: Connection, tenant: str, session_id: str) -> Session | None:
    return visible(_find(connection, session_id), tenant)


def touch(connection: Connection, tenant: str, session_id: str, at: float) -> bool:
    touched = connection.execute(_TOUCH, {"key": session_id, "owner": tenant, "at": at})
    return touched.rowcount == 1


def finish(connection: Connection, tenant: str, session_id: str, finished: str, detail: str | None) -> bool:
    connection.execute(_FINISH, {"key": session_id, "owner": tenant, "how": finished, "detail": detail})
    return get(connection, tenant, session_id) is not None


def page(connection: Connection, tenant: str, limit: int, offset: int) -> tuple[list[Session], Page]:
    where = matching(sessions, tenant=tenant)
    return page_of(connection, Session, sessions, where, newest_first(sessions), limit, offset)


def _find(connection: Connection, session_id: str) -> Session | None:
    row = connection.execute(_BY_ID, {"key": session_id}).first()
    return None if row is None else Session(*row)
