"""Every error leaves the gateway as a problem document (RFC 9457) with a stable ``code``.

Two statuses are never sent to the public SDK: 409, because it sends such a request again, and 501 or any other 5xx
for what a user can mend, because it repeats those for five minutes before it shows them.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import ClassVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gradserve.store.base import StoreError
from gradserve.wire.errors import GradserveError, Problem, UserError

PROBLEM_JSON = "application/problem+json"

log = logging.getLogger(__name__)


class TooLarge(UserError):
    """A body above the limit, before or after decompression. ``start`` is what was decoded of it, if anything."""

    status: ClassVar[int] = 413
    start: bytes = b""


class Refused(Exception):
    """A stored problem that is given to the caller once more."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def problem_response(problem: Problem) -> Response:
    """The document as a response."""
    headers = {"WWW-Authenticate": "X-API-Key"} if problem.status == 401 else None
    return Response(msgspec.json.encode(problem), problem.status, headers, PROBLEM_JSON)


def response_to(error: Exception) -> Response:
    """The response to whatever a handler raised. What is not the caller's fault is logged, not shown."""
    if isinstance(error, Refused):
        return problem_response(error.problem)
    if isinstance(error, UserError):
        return problem_response(error.problem())
    if isinstance(error, ClientDisconnect):
        return problem_response(
            Problem(400, "body.incomplete", "Bad Request", "The client went away before its body ended.")
        )
    log.error("request failed", exc_info=error)
    if isinstance(error, StoreError):
        title = HTTPStatus.SERVICE_UNAVAILABLE.phrase
        detail = f"The server can't write its journal ({error}). Nothing was changed; clients send the request again."
        return problem_response(Problem(503, "storage.failed", title, detail))
    if isinstance(error, GradserveError):
        return problem_response(error.problem())
    detail = "The server failed on this request; its log says why. Nothing was changed; send it again."
    return problem_response(Problem(500, "server.fault", "Internal Server Error", detail))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals: unknown path, wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path
    if status == 405:
        problem = Problem(405, "http.method", "Method Not Allowed", f"{path} does not take {request.method}.")
    elif status == 404:
        problem = Problem(404, "http.path", "Not Found", f"There is no {path} here. See /openapi.json.")
    else:
        problem = Problem(status, "http.error", "Error", f"{request.method} {path} failed.")
    response = problem_response(problem)
    allow = (getattr(error, "headers", None) or {}).get("Allow")
    if allow:
        response.headers["Allow"] = allow
    return response
