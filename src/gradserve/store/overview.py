"""Runs as people look at them: state, checkpoints and bill together. Read by the gateway and by the CLI."""

from __future__ import annotations

import msgspec

from gradserve.store.base import Checkpoint, Event, LedgerLine, LedgerTotal, Page, Run, Store

_EVENTS = 100


class RunOverview(msgspec.Struct, frozen=True):
    """One line of ``gradserve runs``."""

    run: Run
    total: LedgerTotal


class RunDetail(msgspec.Struct, frozen=True):
    """``gradserve run ID``. ``lines`` and ``events`` are the newest ones, oldest first."""

    run: Run
    total: LedgerTotal
    checkpoints: list[Checkpoint]
    lines: list[LedgerLine]
    events: list[Event] = []


class RunList(msgspec.Struct, frozen=True):
    """A page of runs, newest first."""

    runs: list[RunOverview]
    page: Page


async def list_overviews(store: Store, tenant: str | None, limit: int, offset: int) -> RunList:
    """The newest runs with their totals."""
    runs, page = await store.list_runs(tenant, limit, offset)
    return RunList([RunOverview(run, await store.ledger_total(tenant, run.id)) for run in runs], page)


async def run_detail(store: Store, tenant: str | None, run_id: str, lines: int) -> RunDetail | None:
    """One run with its newest ``lines`` ledger lines; None when there is no such run."""
    run = await store.get_run(tenant, run_id)
    if run is None:
        return None
    total = await store.ledger_total(tenant, run_id)
    checkpoints, _ = await store.list_checkpoints(tenant, run_id, 1000, 0)
    newest, _ = await store.ledger_lines(tenant, run_id, lines, max(0, total.lines - lines))
    events, _ = await store.list_events(tenant, run_id, _EVENTS, 0)
    return RunDetail(run, total, checkpoints, newest, events[::-1])
