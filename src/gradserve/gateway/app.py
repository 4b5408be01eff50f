"""The web application: routes on one side, store and catalog on the other, nothing in between that keeps state.

The life of a request: authenticate (auth), read the body within limits (limits), check it (validate), write it into
the journal and wake the scheduler (submit), or wait for a result that is there (routes/futures).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import gradserve
from gradserve.compute.catalog import Catalog
from gradserve.compute.checkpoints import CHECKPOINTS
from gradserve.compute.objects import ObjectStore
from gradserve.gateway.auth import Keys
from gradserve.gateway.call import Api, Gateway, endpoint
from gradserve.gateway.errors import on_http_exception
from gradserve.gateway.routes import ROUTES
from gradserve.gateway.signing import Signer
from gradserve.settings import Settings
from gradserve.store.base import Store
from gradserve.store.wakeups import Wakeups

PREFIX = "/api/v1"
_SCHEMA_REF = "#/components/schemas/{name}"

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(
    settings: Settings,
    store: Store,
    wakeups: Wakeups,
    catalog: Catalog,
    objects: ObjectStore,
    *,
    health: Callable[[], dict[str, Any]],
    lifespan: Lifespan | None = None,
) -> FastAPI:
    """The gateway over an open ``store``. ``health`` is merged into what healthz answers."""
    app = FastAPI(
        title="gradserve",
        version=gradserve.__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        exception_handlers={HTTPException: on_http_exception},
    )
    app.router.route_class = _Route
    app.state.gateway = Gateway(
        settings,
        store,
        wakeups,
        catalog,
        objects,
        health,
        Keys(settings),
        Signer(),
        settings.prices.version,
        settings.data_dir / CHECKPOINTS,
    )
    for api in ROUTES:
        _add(app, api)
    _describe_bodies(app)
    return app


class _Route(APIRoute):
    """In the OpenAPI document as any other; a request goes straight to the handler, which parses it itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


def _add(app: FastAPI, api: Api) -> None:
    extra: dict[str, Any] = {} if api.public else {"security": [{"key": []}]}
    extra["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", api.path)
    ]
    if api.body is not None:
        schema = {"$ref": _SCHEMA_REF.format(name=api.body.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    app.add_api_route(
        PREFIX + api.path,
        endpoint(api),
        methods=[api.method],
        response_model=None,
        name=f"{api.method} {api.path}",
        description=api.handler.__doc__ or "",
        openapi_extra=extra,
    )


def _describe_bodies(app: FastAPI) -> None:
    """Add the msgspec bodies and the key to FastAPI's document, which only knows pydantic's."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        document = plain()
        components = document.setdefault("components", {})
        bodies = [api.body for api in ROUTES if api.body is not None]
        _, schemas = msgspec.json.schema_components(bodies, ref_template=_SCHEMA_REF)
        components.setdefault("schemas", {}).update(schemas)
        components["securitySchemes"] = {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
        return document

    app.openapi = described  # type: ignore[method-assign]
