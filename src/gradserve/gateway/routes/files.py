"""A checkpoint's files as peft or transformers read them, through links that expire; encrypted with age when asked."""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path

from starlette.responses import FileResponse, Response

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.checkpoints import folder_of, small_files, weights_file
from gradserve.compute.encryption import SUFFIX, encrypt_file
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing
from gradserve.gateway.answers import utc
from gradserve.gateway.call import Api, Call, answer_json
from gradserve.gateway.routes.checkpoints import addressed
from gradserve.gateway.signing import LINK_TTL_S, Link
from gradserve.gateway.validate.models import unknown_checkpoint
from gradserve.store.base import Checkpoint
from gradserve.store.wakeups import MakeWhole
from gradserve.wire.codec import JSON
from gradserve.wire.errors import NotFound


async def external_weights_urls(call: Call) -> Response:
    """Links to the files of a checkpoint. They need no key and expire after an hour."""
    path = addressed(call)
    found = await call.store.get_checkpoint(call.tenant, path.run_id, path.kind, path.name)
    if found is None:
        raise unknown_checkpoint(f"tinker://{path.run_id}/{path.kind}/{path.name}", None)
    expires_at = time.time() + LINK_TTL_S
    token = call.gateway.signer.sign(Link(call.tenant, path.run_id, path.kind, path.name, expires_at))
    root = str(call.request.base_url).rstrip("/")
    names = [*_small(call, found), weights_file(found.lora)]
    if found.age_recipients:
        names = [name + SUFFIX for name in names]
    urls = {name: f"{root}/api/v1/files/{token}/{name}" for name in names}
    return answer_json({"urls": urls, "expires": utc(expires_at)})


async def get_file(call: Call) -> Response:
    """A file behind a link. Ranges of weights and of encrypted files are served."""
    link = call.gateway.signer.read(call.path("token"), time.time())
    checkpoint = await call.store.get_checkpoint(link.tenant, link.run_id, link.kind, link.name)
    if checkpoint is None:
        raise unknown_checkpoint(f"tinker://{link.run_id}/{link.kind}/{link.name}", None)
    if checkpoint.age_recipients:
        return await _encrypted(call, checkpoint, link.tenant)
    name = call.path("name")
    if name == weights_file(checkpoint.lora):
        # The digest is the entity tag: a download may go on after the file has moved to the other tier.
        sha256 = base64.b64encode(bytes.fromhex(checkpoint.weights)).decode()
        headers = {"ETag": f'"{checkpoint.weights}"', "Repr-Digest": f"sha-256=:{sha256}:"}  # RFC 9530
        return _file(await _weights(call, checkpoint, link.tenant), name, headers)
    small = _small(call, checkpoint)
    if name in small:
        return Response(small[name], media_type=JSON if name.endswith(".json") else "text/plain")
    raise _no_file(name, checkpoint)


async def _encrypted(call: Call, checkpoint: Checkpoint, tenant: str) -> Response:
    """A file of a checkpoint that may only go out encrypted: made at the first request, the same bytes ever after."""
    name = call.path("name")
    plain_name = name.removesuffix(SUFFIX)
    small = _small(call, checkpoint)
    if plain_name == name or plain_name not in (*small, weights_file(checkpoint.lora)):
        raise _no_file(name, checkpoint)
    folder = folder_of(call.gateway.folders, checkpoint.run_id, checkpoint.kind, checkpoint.name)
    target = folder / name
    async with call.gateway.encrypting:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            plain = small[plain_name] if plain_name in small else await _weights(call, checkpoint, tenant)
            await asyncio.to_thread(encrypt_file, plain, target, checkpoint.age_recipients)
    return _file(target, name)


def _file(path: Path, name: str, headers: dict[str, str] | None = None) -> Response:
    return FileResponse(path, headers=headers, media_type="application/octet-stream", filename=name)


def _no_file(name: str, checkpoint: Checkpoint) -> NotFound:
    return NotFound("file.unknown", f"There is no file {name!r} in {checkpoint.path}.")


def _small(call: Call, checkpoint: Checkpoint) -> dict[str, bytes]:
    try:
        return small_files(checkpoint.base, checkpoint.lora, call.gateway.catalog, call.gateway.objects)
    except ModelUnusable as error:
        raise NotFound("model.unknown", f"{checkpoint.path}: {error}.") from error


async def _weights(call: Call, checkpoint: Checkpoint, tenant: str) -> Path:
    """The file of a checkpoint's weights. Raises ServerError when it is damaged and can't be had again."""
    try:
        return await asyncio.to_thread(call.gateway.objects.verified_path, checkpoint.weights)
    except (ObjectMissing, ObjectCorrupt):
        await call.gateway.wakeups.ask(MakeWhole.of(checkpoint, tenant, "weights"))
        return await asyncio.to_thread(call.gateway.objects.verified_path, checkpoint.weights)


ROUTES = [
    Api(
        "GET",
        "/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls",
        external_weights_urls,
    ),
    Api("GET", "/files/{token}/{name}", get_file, public=True),
]
