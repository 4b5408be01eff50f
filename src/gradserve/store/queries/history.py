"""What Ops measured and what happened to runs: both are only appended."""

from __future__ import annotations

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy.engine import Connection

from gradserve.store.base import Event, Metrics, Page
from gradserve.store.queries.common import matching, page_of
from gradserve.store.tables import events, run_metrics
from gradserve.wire.ops import STEPS

_ADD_METRICS = sa.insert(run_metrics)
_ADD_EVENT = sa.insert(events)
_STEP = sa.select(sa.func.max(run_metrics.c.seq)).where(
    run_metrics.c.run_id == sa.bindparam("of_run"),
    run_metrics.c.version == sa.bindparam("made"),
    run_metrics.c.kind.in_(STEPS),
)


def add_metrics(connection: Connection, metrics: Metrics) -> None:
    connection.execute(_ADD_METRICS, asdict(metrics))


def add_event(connection: Connection, event: Event) -> None:
    connection.execute(_ADD_EVENT, asdict(event))


def seq_of_version(connection: Connection, run_id: str, version: int) -> int | None:
    found: int | None = connection.execute(_STEP, {"of_run": run_id, "made": version}).scalar()
    return 0 if found is None and version == 0 else found


def metrics_page(
    connection: Connection, tenant: str | None, run_id: str, limit: int, offset: int
) -> tuple[list[Metrics], Page]:
    where = matching(run_metrics, tenant=tenant, run_id=run_id)
    return page_of(connection, Metrics, run_metrics, where, [run_metrics.c.n], limit, offset)


def events_page(
    connection: Connection, tenant: str | None, run_id: str | None, limit: int, offset: int
) -> tuple[list[Event], Page]:
    where = matching(events, run_id=run_id)
    if tenant is not None:
        where.append(sa.or_(events.c.tenant == tenant, events.c.tenant.is_(None)))
    return page_of(connection, Event, events, where, [events.c.n.desc()], limit, offset)
