"""retrieve_future: wait for an Op's end, then answer what the scheduler stored. cancel_future: ask for that end."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.responses import Response

from gradserve.gateway.bodies import CancelFutureBody, RetrieveFutureBody
from gradserve.gateway.call import Api, Call, answer_json
from gradserve.gateway.errors import Refused
from gradserve.store.base import Op
from gradserve.wire.codec import JSON
from gradserve.wire.errors import Gone, NotFound


class CancelAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """``state`` is the Op's after the attempt; ``detail`` says why it was not cancelled."""

    request_id: str
    cancelled: bool
    state: str
    detail: str | None = None


async def retrieve_future(call: Call) -> Response:
    """The result of an Op, or 408 when it takes longer than a long poll. May be asked again and again."""
    request_id = (await call.json(RetrieveFutureBody)).request_id
    op = await _ended(call, request_id, call.gateway.settings.long_poll_s)
    if op is None:
        raise _unknown(request_id)
    if op.state == "accepted":
        # 408, not 200: the client then asks again without a warning in the user's log.
        return answer_json({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
    return _result(op)


async def cancel_future(call: Call) -> Response:
    """Stop a sample, or a training request that has not started. Whatever has ended, or can't be stopped, stays."""
    request_id = (await call.json(CancelFutureBody)).request_id
    op = await call.store.get_outcome(call.tenant, request_id)
    if op is not None and op.state == "accepted":
        op = await _stopped(call, op)
    if op is None:
        raise _unknown(request_id)
    return answer_json(_cancel_answer(op))


async def _stopped(call: Call, op: Op) -> Op | None:
    """The Op after the scheduler was asked to stop it."""
    wakeups = call.gateway.wakeups
    waiter = wakeups.waiter(op.id)  # made first, so that the end is not missed
    stops = False
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(call.gateway.settings.long_poll_s):
                stops = await wakeups.cancel(op)
    finally:
        await wakeups.wait(op.id, waiter, call.gateway.settings.long_poll_s if stops else 0)
    return await call.store.get_outcome(call.tenant, op.id)


def _cancel_answer(op: Op) -> CancelAnswer:
    if op.problem is not None and op.problem.code == "op.cancelled":
        return CancelAnswer(op.id, True, op.state)
    if op.state == "accepted":
        return CancelAnswer(op.id, False, op.state, "It runs: a training request is only stopped while it waits.")
    return CancelAnswer(op.id, False, op.state, "It had ended before.")


def _unknown(request_id: str) -> NotFound:
    return NotFound("future.unknown", f"There is no future {request_id!r}.", field="request_id")


async def _ended(call: Call, request_id: str, patience_s: float) -> Op | None:
    """The Op once it has ended, or as it is after ``patience_s``.

    Of an Op that runs the store need not be asked: the scheduler hands its end on as it was stored.
    """
    wakeups = call.gateway.wakeups
    # Made before the first look, so that an end in between is not missed.
    waiter = wakeups.waiter(request_id)
    op: Op | None = None
    waits = wakeups.is_coming(call.tenant, request_id)
    try:
        if not waits:
            op = await call.store.get_outcome(call.tenant, request_id)
            waits = op is not None and op.state == "accepted"
    finally:
        ended = await wakeups.wait(request_id, waiter, patience_s if waits else 0)
    if not waits:  # then ``ended`` may be another tenant's
        return op
    return ended or await call.store.get_outcome(call.tenant, request_id)


def _result(op: Op) -> Response:
    if op.state == "done":
        return Response(op.result, headers=_provenance(op), media_type=op.content_type or JSON)
    if op.state == "expired":
        raise Gone(
            "future.expired",
            f"The result of {op.id} has expired.",
            field="request_id",
            fix="Send the request again under a new seq.",
        )
    assert op.problem is not None, f"{op.id} is {op.state} without a problem"
    if op.state == "rejected":
        raise Refused(op.problem)
    category = "user" if op.problem.status < 500 else "server"
    return answer_json({"error": op.problem.detail, "category": category, "code": op.problem.code})


def _provenance(op: Op) -> dict[str, str]:
    """Which weights a result was computed with. In headers: clients of the protocol leave those they do not know."""
    headers = {}
    if op.weights is not None:
        headers["x-gradserve-weights"] = op.weights
    if op.version is not None:
        headers["x-gradserve-version"] = str(op.version)
    return headers


ROUTES = [
    Api("POST", "/retrieve_future", retrieve_future, RetrieveFutureBody),
    Api("POST", "/cancel_future", cancel_future, CancelFutureBody),
]
