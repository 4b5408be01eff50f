"""One request as a handler sees it, and what all handlers share.

A handler is ``async def name(call: Call) -> Response``. It raises what the caller must know; the wrapper that
:func:`endpoint` puts around it authenticates first and turns whatever is raised into a problem document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gradserve.compute.catalog import Catalog
from gradserve.compute.objects import ObjectStore
from gradserve.gateway.auth import Keys
from gradserve.gateway.errors import response_to
from gradserve.gateway.graph_cache import GraphCache
from gradserve.gateway.limits import read_body
from gradserve.gateway.signing import Signer
from gradserve.settings import Settings
from gradserve.store.base import SamplingSession, Store
from gradserve.store.wakeups import Wakeups
from gradserve.wire.codec import JSON
from gradserve.wire.errors import Invalid

T = TypeVar("T")


@dataclass
class Gateway:
    """The collaborators of every handler, handed down from the composition root.

    ``samplers`` caches sampling sessions by (tenant, id): what a sample reads of one never changes.
    ``told`` holds the runs that were told of a loss's note. ``folders`` is the root of the checkpoints' folders; a file
    in them is encrypted by whoever holds ``encrypting``, so that all who download get the same bytes.
    """

    settings: Settings
    store: Store
    wakeups: Wakeups
    catalog: Catalog
    objects: ObjectStore
    health: Callable[[], dict[str, Any]]
    keys: Keys
    signer: Signer
    price_version: str
    folders: Path
    encrypting: asyncio.Lock = field(default_factory=asyncio.Lock)
    samplers: dict[tuple[str, str], SamplingSession] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    graphs: GraphCache = field(default_factory=GraphCache)


class Call:
    """An authenticated request. ``tenant`` is empty on public endpoints."""

    __slots__ = ("gateway", "request", "tenant")

    def __init__(self, gateway: Gateway, request: Request, tenant: str) -> None:
        self.gateway = gateway
        self.request = request
        self.tenant = tenant

    @property
    def store(self) -> Store:
        """The store."""
        return self.gateway.store

    def path(self, name: str) -> str:
        """A path parameter."""
        return str(self.request.path_params[name])

    @property
    def query(self) -> Mapping[str, str]:
        """The query parameters."""
        return self.request.query_params

    async def body(self) -> bytes:
        """The decompressed body, within the limit."""
        return await read_body(self.request, self.gateway.settings.max_body_bytes)

    async def json(self, kind: type[T]) -> T:
        """The body as ``kind``. Raises Invalid naming the field."""
        return decode_json(await self.body(), kind)


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True)
class Api:
    """A line of a route table. ``body`` is the JSON struct that the handler reads, for the OpenAPI document."""

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    public: bool = False


def endpoint(api: Api) -> Callable[[Request], Awaitable[Response]]:
    """The ASGI-facing form of a handler. Nothing escapes it but a response."""
    handler, public = api.handler, api.public

    async def answer(request: Request) -> Response:
        try:
            gateway: Gateway = request.app.state.gateway
            tenant = "" if public else gateway.keys.tenant(request.headers.get("x-api-key"))
            return await handler(Call(gateway, request, tenant))
        except Exception as error:
            return response_to(error)

    return answer


def answer_json(value: object, status: int = 200) -> Response:
    """Any msgspec-encodable value as a JSON response."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def no_content() -> Response:
    """204."""
    return Response(status_code=204)


def decode_json(body: bytes, kind: type[T]) -> T:
    """JSON as ``kind``. Raises Invalid with the path of the field that does not fit."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_problem(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid("body.malformed", f"The body is not JSON ({error}).") from error


def decode_msgpack(body: bytes, kind: type[T]) -> T:
    """msgpack as ``kind``. Raises Invalid with the path of the field that does not fit."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_problem(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid("body.malformed", f"The body is not msgpack ({error}).") from error


def _validation_problem(message: str) -> Invalid:
    """msgspec says ``what - at `$.a.b[...]` ``; both halves go to where a client looks for them."""
    what, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if "unknown field" in what or "missing required field" in what:
        name = what.split("`")[1]
        path = f"{path}.{name}" if path else name
        code = "body.unknown_field" if "unknown field" in what else "body.missing_field"
        said = "is not a field that this server knows" if "unknown" in what else "is missing"
        fix = "Leave it out or correct its name." if "unknown" in what else None
        return Invalid(code, f"{path} {said}.", field=path, fix=fix)
    return Invalid("body.type", f"{path or 'the body'}: {what}.", field=path or None)
