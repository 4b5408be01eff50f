"""Training runs, as they stand."""

from __future__ import annotations

from starlette.responses import Response

from gradserve.gateway.answers import checkpoint_answer, cursor, page_of, run_answer
from gradserve.gateway.call import Api, Call, answer_json
from gradserve.gateway.submit import known_run

_RECENT = 100


async def list_runs(call: Call) -> Response:
    """The tenant's runs, newest first."""
    limit, offset = page_of(call.query, 20)
    runs, page = await call.store.list_runs(call.tenant, limit, offset)
    answers = []
    for run in runs:
        recent, _ = await call.store.list_checkpoints(call.tenant, run.id, _RECENT, 0)
        answers.append(run_answer(run, recent))
    return answer_json({"training_runs": answers, "cursor": cursor(page)})


async def get_run(call: Call) -> Response:
    """One run."""
    run = await known_run(call, call.path("run_id"), "training_run_id")
    recent, _ = await call.store.list_checkpoints(call.tenant, run.id, _RECENT, 0)
    return answer_json(run_answer(run, recent))


async def run_checkpoints(call: Call) -> Response:
    """All checkpoints of a run, newest first."""
    run = await known_run(call, call.path("run_id"), "training_run_id")
    found, page = await call.store.list_checkpoints(call.tenant, run.id, _RECENT, 0)
    while len(found) < page.total:
        more, page = await call.store.list_checkpoints(call.tenant, run.id, _RECENT, len(found))
        if not more:
            break
        found += more
    return answer_json({"checkpoints": [checkpoint_answer(checkpoint) for checkpoint in found]})


ROUTES = [
    Api("GET", "/training_runs", list_runs),
    Api("GET", "/training_runs/{run_id}", get_run),
    Api("GET", "/training_runs/{run_id}/checkpoints", run_checkpoints),
]
