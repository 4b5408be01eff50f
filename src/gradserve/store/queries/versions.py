"""Durable versions of runs."""

from __future__ import annotations

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy import bindparam
from sqlalchemy.engine import Connection

from gradserve.store.base import Version
from gradserve.store.queries.common import matching
from gradserve.store.tables import checkpoints, fields, runs, sessions, versions

_INSERT = sa.insert(versions)
_RANKED = sa.select(
    versions.c.n, sa.func.row_number().over(partition_by=versions.c.run_id, order_by=versions.c.n.desc()).label("rank")
).subquery()
_BEYOND = versions.c.n.in_(sa.select(_RANKED.c.n).where(_RANKED.c.rank > bindparam("keep")))
_FINISHED = sa.exists().where(
    runs.c.id == versions.c.run_id, sessions.c.id == runs.c.session_id, sessions.c.finished.is_not(None)
)
_OVER = sa.or_(_BEYOND, sa.and_(versions.c.created_at < bindparam("finished_before"), _FINISHED))
_OLD = sa.select(*fields(Version, versions)).where(_OVER).order_by(versions.c.n)
_DROP = sa.delete(versions).where(_OVER)
# Numbers alone are given again when the newest row was deleted.
_MARKS = [
    sa.select(sa.func.count(), sa.func.max(table.c.n), sa.func.max(table.c.created_at)).select_from(table)
    for table in (versions, checkpoints)
]


def put(connection: Connection, version: Version) -> None:
    connection.execute(_INSERT, asdict(version))


def listed(connection: Connection, tenant: str | None, run_id: str) -> list[Version]:
    where = matching(versions, tenant=tenant, run_id=run_id)
    query = sa.select(*fields(Version, versions)).where(*where).order_by(versions.c.n.desc())
    return [Version(*row) for row in connection.execute(query)]


def retain(connection: Connection, keep: int, finished_before: float) -> list[Version]:
    bounds = {"keep": keep, "finished_before": finished_before}
    old = [Version(*row) for row in connection.execute(_OLD, bounds)]
    if old:
        connection.execute(_DROP, bounds)
    return old


def mark(connection: Connection) -> str | None:
    """Another text after every version and every checkpoint that is written or deleted; None while there are none."""
    found = [tuple(connection.execute(query).one()) for query in _MARKS]
    return repr(found) if any(count for count, *_ in found) else None
