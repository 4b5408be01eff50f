"""What runs did and what it cost: our own routes, beside the public protocol. Amounts are exact decimals (strings)."""

from __future__ import annotations

from starlette.responses import Response

from gradserve.gateway.answers import cursor, number_of, page_of
from gradserve.gateway.call import Api, Call, answer_json
from gradserve.gateway.submit import known_run
from gradserve.store.overview import list_overviews, run_detail


async def list_runs(call: Call) -> Response:
    """Runs with their totals, newest first: what ``gradserve runs`` shows."""
    limit, offset = page_of(call.query, 20)
    return answer_json(await list_overviews(call.store, call.tenant, limit, offset))


async def get_run(call: Call) -> Response:
    """A run with its checkpoints and its newest ledger lines (``?lines=``): what ``gradserve run`` shows."""
    lines = number_of(call.query, "lines", 20, 0, 1000)
    run = await known_run(call, call.path("run_id"), "run_id")
    return answer_json(await run_detail(call.store, call.tenant, run.id, lines))


async def run_ledger(call: Call) -> Response:
    """The ledger lines of a run, oldest first, and their total."""
    run = await known_run(call, call.path("run_id"), "run_id")
    limit, offset = page_of(call.query, 1000)
    lines, page = await call.store.ledger_lines(call.tenant, run.id, limit, offset)
    total = await call.store.ledger_total(call.tenant, run.id)
    return answer_json({"lines": lines, "total": total, "cursor": cursor(page)})


async def ledger(call: Call) -> Response:
    """The tenant's total, or that of one session (``?session_id=``)."""
    total = await call.store.ledger_total(call.tenant, session_id=call.query.get("session_id"))
    return answer_json({"total": total})


ROUTES = [
    Api("GET", "/gradserve/runs", list_runs),
    Api("GET", "/gradserve/runs/{run_id}", get_run),
    Api("GET", "/gradserve/runs/{run_id}/ledger", run_ledger),
    Api("GET", "/gradserve/ledger", ledger),
]
