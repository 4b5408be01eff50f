"""Checkpoints by their path: list, delete, publish, expire."""

from __future__ import annotations

import asyncio
import shutil
import time

from starlette.responses import Response

from gradserve.compute.checkpoints import folder_of
from gradserve.gateway.answers import checkpoint_answer, cursor, page_of
from gradserve.gateway.bodies import TtlBody
from gradserve.gateway.call import Api, Call, answer_json, no_content
from gradserve.gateway.validate.models import CheckpointPath, ttl, unknown_checkpoint

_ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


def addressed(call: Call) -> CheckpointPath:
    """The checkpoint that the request's path names."""
    return CheckpointPath(call.path("run_id"), call.path("kind"), call.path("name"))


def require(found: bool, path: CheckpointPath) -> None:
    """Raise NotFound when the store knew nothing of ``path``."""
    if not found:
        raise unknown_checkpoint(f"tinker://{path.run_id}/{path.kind}/{path.name}", None)


async def list_checkpoints(call: Call) -> Response:
    """All of the tenant's checkpoints, newest first."""
    limit, offset = page_of(call.query, 100)
    found, page = await call.store.list_checkpoints(call.tenant, None, limit, offset)
    return answer_json({"checkpoints": [checkpoint_answer(c) for c in found], "cursor": cursor(page)})


async def delete_checkpoint(call: Call) -> Response:
    """Forget a checkpoint and its files. Sampling sessions that were opened on it go on."""
    path = addressed(call)
    require(await call.store.delete_checkpoint(call.tenant, path.run_id, path.kind, path.name), path)
    folder = folder_of(call.gateway.folders, path.run_id, path.kind, path.name)
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return no_content()


async def publish(call: Call) -> Response:
    """Let every tenant read a checkpoint."""
    path = addressed(call)
    require(await call.store.set_checkpoint_public(call.tenant, path.run_id, path.kind, path.name, True), path)
    return no_content()


async def unpublish(call: Call) -> Response:
    """Take that back."""
    path = addressed(call)
    require(await call.store.set_checkpoint_public(call.tenant, path.run_id, path.kind, path.name, False), path)
    return no_content()


async def set_ttl(call: Call) -> Response:
    """Let a checkpoint expire so many seconds from now, or never (null)."""
    path = addressed(call)
    seconds = ttl((await call.json(TtlBody)).ttl_seconds)
    expires_at = None if seconds is None else time.time() + seconds
    require(await call.store.set_checkpoint_ttl(call.tenant, path.run_id, path.kind, path.name, expires_at), path)
    return no_content()


ROUTES = [
    Api("GET", "/checkpoints", list_checkpoints),
    Api("DELETE", _ONE, delete_checkpoint),
    Api("POST", _ONE + "/publish", publish),
    Api("DELETE", _ONE + "/publish", unpublish),
    Api("PUT", _ONE + "/ttl", set_ttl, TtlBody),
]
