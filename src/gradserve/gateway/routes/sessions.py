"""Sessions: one per client, alive by heartbeats, ended by finish."""

from __future__ import annotations

import time
import uuid

from starlette.responses import Response

from gradserve.gateway.answers import page_of
from gradserve.gateway.bodies import CreateSessionBody, FinishBody, SearchBody, SessionBody
from gradserve.gateway.call import Api, Call, answer_json
from gradserve.gateway.search import search
from gradserve.gateway.submit import live_session
from gradserve.gateway.validate.models import metadata
from gradserve.store.base import Session
from gradserve.wire.errors import NotFound


def _unknown(session_id: str) -> NotFound:
    return NotFound("session.unknown", f"There is no session {session_id!r}.", field="session_id")


async def create_session(call: Call) -> Response:
    """Open a session."""
    body = await call.json(CreateSessionBody)
    now = time.time()
    session = Session(
        id=str(uuid.uuid4()),
        tenant=call.tenant,
        created_at=now,
        last_seen_at=now,
        display_name=body.display_name,
        project_id=body.project_id,
        tags=tuple(body.tags),
        user_metadata=metadata(body.user_metadata),
    )
    await call.store.create_session(session)
    return answer_json({"type": "create_session", "session_id": session.id})


async def heartbeat(call: Call) -> Response:
    """The client is alive. 410 after finish, which ends its heartbeats."""
    session = await live_session(call, (await call.json(SessionBody)).session_id)
    await call.store.touch_session(call.tenant, session.id, time.time())
    return answer_json({"type": "session_heartbeat"})


async def finish(call: Call) -> Response:
    """The client is done. The first reason stays."""
    body = await call.json(FinishBody)
    session_id = call.path("session_id")
    await call.store.finish_session(call.tenant, session_id, body.reason.type, body.detail)
    if await call.store.get_session(call.tenant, session_id) is None:
        raise _unknown(session_id)
    return answer_json({})


async def list_sessions(call: Call) -> Response:
    """Ids of the tenant's sessions, newest first."""
    sessions, _ = await call.store.list_sessions(call.tenant, *page_of(call.query, 20))
    return answer_json({"sessions": [session.id for session in sessions]})


async def get_session(call: Call) -> Response:
    """One session, with its runs and samplers."""
    session = await call.store.get_session(call.tenant, call.path("session_id"))
    if session is None:
        raise _unknown(call.path("session_id"))
    runs = await call.store.runs_of_session(call.tenant, session.id)
    samplers = await call.store.samplers_of_session(call.tenant, session.id)
    return answer_json(
        {
            "training_run_ids": [run.id for run in runs],
            "sampler_ids": [sampler.id for sampler in samplers],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }
    )


async def search_sessions(call: Call) -> Response:
    """Sessions by id, name, project, metadata and status."""
    return answer_json(await search(call.store, call.tenant, await call.json(SearchBody)))


ROUTES = [
    Api("POST", "/create_session", create_session, CreateSessionBody),
    Api("POST", "/session_heartbeat", heartbeat, SessionBody),
    Api("POST", "/sessions/search", search_sessions, SearchBody),
    Api("POST", "/sessions/{session_id}/finish", finish, FinishBody),
    Api("GET", "/sessions", list_sessions),
    Api("GET", "/sessions/{session_id}", get_session),
]
