"""From a checked request to an entry in the journal, or to a consumed number.

A client counts its training requests and never sends a refused one again, so a refusal must be written down too:
a seq that is missing from the journal would stop the run for ever.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response

from gradserve.gateway.bodies import Identity
from gradserve.gateway.call import Call, answer_json, decode_json
from gradserve.gateway.errors import Refused
from gradserve.gateway.same_base import require_base_of_run
from gradserve.gateway.validate.models import MAX_SEQ, sequence
from gradserve.store.base import IdentityConflict, Op, Run, Session
from gradserve.wire.errors import Gone, Invalid, NotFound, UserError
from gradserve.wire.ops import OpBody, OpKind, encode_body, kind_of


class Future(msgspec.Struct, frozen=True, omit_defaults=True):
    """What every submission answers."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class RunRequest(Protocol):
    """A JSON body that addresses a run."""

    @property
    def model_id(self) -> str: ...
    @property
    def seq_id(self) -> int: ...


R = TypeVar("R", bound=RunRequest)


async def live_session(call: Call, session_id: str) -> Session:
    """The tenant's session. Raises NotFound, or Gone when it was finished."""
    return _live(session_id, await call.store.get_session(call.tenant, session_id))


def _live(session_id: str, session: Session | None) -> Session:
    if session is None:
        raise NotFound("session.unknown", f"There is no session {session_id!r}.", field="session_id")
    if session.finished is not None:
        raise Gone(
            "session.finished",
            f"Session {session_id} was finished ({session.finished}).",
            field="session_id",
            fix="Make a new ServiceClient; saved checkpoints can be loaded from it.",
        )
    return session


async def known_run(call: Call, run_id: str, field: str = "model_id") -> Run:
    """The tenant's run. Raises NotFound."""
    run = await call.store.get_run(call.tenant, run_id)
    if run is None:
        raise _unknown_run(run_id, field)
    return run


async def open_run(call: Call, run_id: str) -> Run:
    """The tenant's run, whose session goes on and whose base model is offered. Raises NotFound, Gone, Invalid."""
    found = await call.store.get_run_and_session(call.tenant, run_id)
    if found is None:
        raise _unknown_run(run_id, "model_id")
    run, session = found
    _live(run.session_id, session)
    await require_base_of_run(call, run)
    return run


def _unknown_run(run_id: str, field: str) -> NotFound:
    return NotFound("run.unknown", f"There is no run {run_id!r}.", field=field)


def op_id(scope: str, seq: int) -> str:
    """The id of an Op: the same for every replay, and safe in a URL."""
    return f"{scope}:op:{seq}"


def make_op(call: Call, scope: str, seq: int, session_id: str, run_id: str | None, body: OpBody) -> Op:
    """A journal entry for ``body``, accepted now."""
    return Op(
        id=op_id(scope, seq),
        tenant=call.tenant,
        session_id=session_id,
        scope=scope,
        seq=seq,
        kind=kind_of(body),
        body=encode_body(body),
        accepted_at=time.time(),
        run_id=run_id,
        price_version=call.gateway.price_version,
    )


async def accept(call: Call, op: Op, new_run: Run | None = None) -> Op:
    """Write ``op``; a replay finds what is there. Raises Refused when it was refused before, Invalid on conflict."""
    try:
        stored, is_new = await call.store.submit(op, new_run)
    except IdentityConflict as conflict:
        if (same := await _sent_again_otherwise(call, op)) is not None:
            return same
        raise Invalid(
            "op.conflict",
            f"seq {op.seq} of {op.scope} was already used for another request.",
            field="seq_id",
            fix="Every request of a client needs a seq of its own; only exact repetitions may share one.",
        ) from conflict
    if stored.state == "rejected" and stored.problem is not None:
        raise Refused(stored.problem)
    if is_new:
        call.gateway.wakeups.submitted(stored)
    return stored


async def _sent_again_otherwise(call: Call, op: Op) -> Op | None:
    """The stored Op, when ``op`` only repeats it in other words.

    The public SDK draws a new number for an unnamed sampling session at every attempt to send the same request; the
    answer names the session that the first attempt opened.
    """
    if op.kind != "save_for_sampling":
        return None
    stored = await call.store.get_op(call.tenant, op.id)
    return stored if stored is not None and stored.kind == op.kind else None


async def consume(call: Call, model_id: str, seq: int, kind: OpKind, error: UserError) -> None:
    """Write down that (model_id, seq) was refused, if it names a run, and let the run go on."""
    run = await call.store.get_run(call.tenant, model_id)
    if run is None or not 1 <= seq <= MAX_SEQ:
        return
    op = Op(
        id=op_id(run.id, seq),
        tenant=call.tenant,
        session_id=run.session_id,
        scope=run.id,
        seq=seq,
        kind=kind,
        body=b"",
        accepted_at=time.time(),
        run_id=run.id,
        price_version=call.gateway.price_version,
    )
    with suppress(IdentityConflict):
        stored = await call.store.reject(op, error.problem())
        if stored.state == "rejected":
            call.gateway.wakeups.submitted(stored)


async def is_replay(call: Call, scope: str, seq: int) -> bool:
    """Whether this very request was accepted before: then the state it met may have been changed by itself."""
    op = await call.store.get_op(call.tenant, op_id(scope, seq))
    return op is not None and op.state != "rejected"


async def submit_to_run(
    call: Call,
    kind: OpKind,
    body_type: type[R],
    build: Callable[[Call, Run, R], Awaitable[OpBody]],
    decode: Callable[[bytes, type], Any] = decode_json,
) -> Response:
    """The life of a training request: read, find the run, check by ``build``, write. Refusals consume the seq."""
    raw = await call.body()
    try:
        request: R = decode(raw, body_type)
        seq = sequence(request.seq_id, "seq_id", 1)
        run = await open_run(call, request.model_id)
        body = await build(call, run, request)
    except UserError as error:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            read = msgspec.json.decode if decode is decode_json else msgspec.msgpack.decode
            identity = read(raw, type=Identity)
            await consume(call, identity.model_id, identity.seq_id, kind, error)
        raise
    op = await accept(call, make_op(call, run.id, seq, run.session_id, run.id, body))
    return future_of(op)


def future_of(op: Op) -> Response:
    """The answer to an accepted training request."""
    return answer_json(Future(op.id, model_id=op.scope))
