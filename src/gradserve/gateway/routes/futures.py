"""retrieve_future: wait for an Op's end, then answer what the scheduler stored."""

from __future__ import annotations

from starlette.responses import Response

from gradserve.gateway.bodies import RetrieveFutureBody
from gradserve.gateway.call import Api, Call, answer_json
from gradserve.gateway.errors import Refused
from gradserve.store.base import Op
from gradserve.wire.codec import JSON
from gradserve.wire.errors import Gone, NotFound


async def retrieve_future(call: Call) -> Response:
    """The result of an Op, or 408 when it takes longer than a long poll. May be asked again and again."""
    request_id = (await call.json(RetrieveFutureBody)).request_id
    op = await _ended(call, request_id, call.gateway.settings.long_poll_s)
    if op is None:
        raise NotFound("future.unknown", f"There is no future {request_id!r}.", field="request_id")
    if op.state == "accepted":
        # 408, not 200: the client then asks again without a warning in the user's log.
        return answer_json({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
    return _result(op)


async def _ended(call: Call, request_id: str, patience_s: float) -> Op | None:
    """The Op once it has ended, or as it is after ``patience_s``."""
    wakeups = call.gateway.wakeups
    # Made before the first look, so that an end in between is not missed.
    waiter = wakeups.waiter(request_id)
    waits = False
    try:
        op = await call.store.get_outcome(call.tenant, request_id)
        waits = op is not None and op.state == "accepted"
    finally:
        await wakeups.wait(request_id, waiter, patience_s if waits else 0)
    return await call.store.get_outcome(call.tenant, request_id) if waits else op


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


ROUTES = [Api("POST", "/retrieve_future", retrieve_future, RetrieveFutureBody)]
