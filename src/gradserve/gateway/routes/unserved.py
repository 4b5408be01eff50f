"""Endpoints of the protocol that this server does not have. Each says so, and at once.

The answer is 501. The public SDK would repeat that for five minutes before showing it, so a request that carries the
SDK's retry header gets the same problem as a 400, which it shows at once (docs/decisions/0005).
"""

from __future__ import annotations

from starlette.responses import Response

from gradserve.gateway.call import Api, Call, Handler
from gradserve.wire.errors import NotServed, Unsupported

_RETRY_HEADER = "x-stainless-retry-count"


def _refusal(what: str, fix: str | None = None) -> Handler:
    async def unserved(call: Call) -> Response:
        kind = Unsupported if _RETRY_HEADER in call.request.headers else NotServed
        raise kind("unsupported.endpoint", f"{what} not served here.", fix=fix)

    unserved.__doc__ = f"{what} not served."
    return unserved


ROUTES = [
    Api("POST", "/auth/token", _refusal("Token exchange is", "Use the API key itself.")),
    Api("DELETE", "/auth/apikey/me", _refusal("Revoking a key is", "Remove it from the server's settings.")),
    Api("POST", "/retrieve_futures", _refusal("Waiting for many futures is", "Use retrieve_future.")),
    Api("POST", "/copy_weights", _refusal("Copying checkpoints is", "load_weights takes any visible path.")),
    Api("PUT", "/sessions/{session_id}/project", _refusal("Moving sessions between projects is")),
    Api("GET", "/sessions/{session_id}/trace_export", _refusal("Trace export is")),
    Api("GET", "/audit", _refusal("The audit log is")),
    Api(
        "GET",
        "/billing/usage/events",
        _refusal("Usage events are", "See GET /api/v1/gradserve/ledger and `gradserve runs`."),
    ),
    Api(
        "GET",
        "/billing/usage/checkpoints/current",
        _refusal("Checkpoint storage usage is", "See GET /api/v1/checkpoints for sizes."),
    ),
]
