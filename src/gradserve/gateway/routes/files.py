"""A checkpoint's files in PEFT form, through links that expire."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.responses import FileResponse, Response

from gradserve.compute.checkpoints import adapter_config
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing
from gradserve.gateway.answers import utc
from gradserve.gateway.call import Api, Call, answer_json
from gradserve.gateway.routes.checkpoints import addressed, require
from gradserve.gateway.signing import LINK_TTL_S, Link
from gradserve.gateway.validate.models import unknown_checkpoint
from gradserve.store.base import Checkpoint
from gradserve.wire.codec import JSON
from gradserve.wire.errors import NotFound, ServerError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


async def external_weights_urls(call: Call) -> Response:
    """Links to the files of a checkpoint. They need no key and expire after an hour."""
    path = addressed(call)
    found = await call.store.get_checkpoint(call.tenant, path.run_id, path.kind, path.name)
    require(found is not None, path)
    expires_at = time.time() + LINK_TTL_S
    token = call.gateway.signer.sign(Link(call.tenant, path.run_id, path.kind, path.name, expires_at))
    root = str(call.request.base_url).rstrip("/")
    urls = {name: f"{root}/api/v1/files/{token}/{name}" for name in (CONFIG, WEIGHTS)}
    return answer_json({"urls": urls, "expires": utc(expires_at)})


async def get_file(call: Call) -> Response:
    """A file behind a link. Ranges are served."""
    link = call.gateway.signer.read(call.path("token"), time.time())
    checkpoint = await call.store.get_checkpoint(link.tenant, link.run_id, link.kind, link.name)
    if checkpoint is None:
        raise unknown_checkpoint(f"tinker://{link.run_id}/{link.kind}/{link.name}", None)
    name = call.path("name")
    if name == CONFIG:
        config = msgspec.json.encode(adapter_config(checkpoint.base, checkpoint.lora))
        return Response(msgspec.json.format(config, indent=2), media_type=JSON)
    if name == WEIGHTS:
        return await _weights(call, checkpoint)
    raise NotFound("file.unknown", f"There is no file {name!r} in {checkpoint.path}.")


async def _weights(call: Call, checkpoint: Checkpoint) -> Response:
    try:
        path = await asyncio.to_thread(call.gateway.objects.verified_path, checkpoint.weights)
    except ObjectMissing as error:
        raise ServerError("checkpoint.lost", f"The weights of {checkpoint.path} are not on this machine.") from error
    except ObjectCorrupt as error:
        raise ServerError("checkpoint.corrupt", f"The stored weights of {checkpoint.path} are damaged.") from error
    return FileResponse(path, media_type="application/octet-stream", filename=WEIGHTS)


ROUTES = [
    Api(
        "GET",
        "/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls",
        external_weights_urls,
    ),
    Api("GET", "/files/{token}/{name}", get_file, public=True),
]
