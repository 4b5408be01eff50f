"""sessions/search: filters over the tenant's sessions, newest first."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import msgspec

from gradserve.gateway.answers import utc
from gradserve.gateway.bodies import SearchBody, SearchCursor
from gradserve.store.base import Session, Store
from gradserve.wire.errors import Invalid

ACTIVE_WITHIN_S = 120.0
"""A session without a heartbeat for so long is neither active nor finished."""

_BATCH = 200
_MAX_LIMIT = 200


class Summary(msgspec.Struct, frozen=True):
    """One session that was found."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    checkpoints_count: int
    checkpoint_storage_bytes: int
    status: dict[str, Any] | None
    display_name: str | None
    user_metadata: dict[str, str]


class Found(msgspec.Struct, frozen=True):
    """A page. ``next_cursor`` is None on the last one."""

    sessions: list[Summary]
    next_cursor: SearchCursor | None = None


async def search(store: Store, tenant: str, wanted: SearchBody) -> Found:
    """One page of what matches. Raises Invalid."""
    if not 1 <= wanted.limit <= _MAX_LIMIT:
        raise Invalid("query.range", f"limit is {wanted.limit}; it must be 1 to {_MAX_LIMIT}.", field="limit")
    now = time.time()
    matches: list[Session] = []
    started = wanted.cursor is None
    offset = 0
    while len(matches) <= wanted.limit:
        sessions, page = await store.list_sessions(tenant, _BATCH, offset)
        for session in sessions:
            if started and _matches(session, wanted, tenant, now):
                matches.append(session)
            started = started or (wanted.cursor is not None and session.id == wanted.cursor.last_session_id)
        offset += _BATCH
        if offset >= page.total:
            break
    shown = matches[: wanted.limit]
    more = len(matches) > wanted.limit
    last = SearchCursor(utc(shown[-1].created_at).isoformat(), shown[-1].id) if more else None
    return Found([await _summary(store, session, now) for session in shown], last)


def _matches(session: Session, wanted: SearchBody, tenant: str, now: float) -> bool:
    if wanted.owner.type == "user" and tenant not in (wanted.owner.owner_urns or ()):
        return False
    if wanted.project_ids is not None and session.project_id not in wanted.project_ids:
        return False
    if any(session.user_metadata.get(key) != value for key, value in wanted.user_metadata.items()):
        return False
    return _named(session, wanted) and _in_status(session, wanted, now)


def _named(session: Session, wanted: SearchBody) -> bool:
    """By id or by words of the name; either one is enough."""
    if wanted.session_id is None and wanted.display_name is None:
        return True
    if session.id == wanted.session_id:
        return True
    if wanted.display_name is None:
        return False
    name = (session.display_name or "").casefold()
    return all(word in name for word in wanted.display_name.casefold().split())


def _in_status(session: Session, wanted: SearchBody, now: float) -> bool:
    if wanted.statuses is None:
        return True
    status = _status(session, now)
    return status is not None and any(
        query.type == status["type"] and (query.reasons is None or session.finished in query.reasons)
        for query in wanted.statuses
    )


def _status(session: Session, now: float) -> dict[str, Any] | None:
    if session.finished is not None:
        reason = {"type": session.finished}
        return {"type": "client_finished", "reason": reason, "detail": session.finish_detail}
    return {"type": "active"} if now - session.last_seen_at < ACTIVE_WITHIN_S else None


async def _summary(store: Store, session: Session, now: float) -> Summary:
    count = size = 0
    for run in await store.runs_of_session(session.tenant, session.id):
        checkpoints, page = await store.list_checkpoints(session.tenant, run.id, _BATCH, 0)
        count += page.total
        size += sum(checkpoint.size_bytes for checkpoint in checkpoints)
    return Summary(
        session_id=session.id,
        created_at=utc(session.created_at),
        owner=session.tenant,
        project_id=session.project_id or "default",
        checkpoints_count=count,
        checkpoint_storage_bytes=size,
        status=_status(session, now),
        display_name=session.display_name,
        user_metadata=session.user_metadata,
    )
