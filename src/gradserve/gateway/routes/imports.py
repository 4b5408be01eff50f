"""Adapters from outside as checkpoints: our own route, beside the public protocol."""

from __future__ import annotations

import asyncio
import hashlib
import time

import msgspec
from starlette.responses import Response

from gradserve.gateway.bodies import ImportBody
from gradserve.gateway.call import Api, Call, answer_json, decode_json
from gradserve.gateway.same_base import identity_metadata, require_base_of_checkpoint
from gradserve.gateway.validate.adapter import imported
from gradserve.gateway.validate.models import checkpoint_name, known_model
from gradserve.store.base import Checkpoint


async def import_adapter(call: Call) -> Response:
    """Make a PEFT adapter a checkpoint without optimizer moments. The same adapter gets the same path again."""
    body = await asyncio.to_thread(decode_json, await call.body(), ImportBody)
    base = known_model(call.gateway.catalog, body.base, "base")
    name = checkpoint_name(body.name, "name")
    max_rank = call.gateway.settings.max_lora_rank
    made = await asyncio.to_thread(imported, body.config, body.weights, base, max_rank)
    digest = await asyncio.to_thread(_keep, call, made.weights)
    checkpoint = Checkpoint(
        run_id=_run_id(call.tenant, base.name, digest),
        tenant=call.tenant,
        kind="weights",
        name=name,
        base=base.name,
        lora=made.lora,
        version=0,
        weights=digest,
        moments=None,
        size_bytes=len(made.weights),
        created_at=time.time(),
        user_metadata=await identity_metadata(call, base.name),
    )
    stored = await call.store.put_checkpoint(checkpoint)
    await require_base_of_checkpoint(call, stored)  # it may have been imported before, onto another model of that name
    answer = {"path": stored.path, "lora": msgspec.to_builtins(made.lora), "weights": digest}
    return answer_json(answer | {"added_modules": made.added, "notice": made.notice})


def _keep(call: Call, weights: bytes) -> str:
    digest = call.gateway.objects.put(weights)
    call.gateway.objects.persist(digest)
    return digest


def _run_id(tenant: str, base: str, digest: str) -> str:
    """An id of no run. Two tenants, or two bases, with the same adapter must not meet at one path."""
    return "import-" + hashlib.sha256(f"{tenant}\n{base}\n{digest}".encode()).hexdigest()[:16]


ROUTES = [Api("POST", "/gradserve/import", import_adapter, ImportBody)]
