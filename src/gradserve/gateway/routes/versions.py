"""A run's history, our own routes: durable versions, events, metrics, lineage; naming a step, rolling back to one.

Also the client's own state of a run (the position of a data loader, a schedule): bytes that gradserve keeps for it.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.responses import Response

from gradserve.compute.norms import weight_norms
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing
from gradserve.compute.sizes import size_of
from gradserve.gateway.answers import cursor, page_of
from gradserve.gateway.bodies import NameBody, RollbackBody
from gradserve.gateway.call import Api, Call, answer_json, no_content
from gradserve.gateway.limits import read_body
from gradserve.gateway.same_base import require_base_of_run
from gradserve.gateway.storage import stored_of
from gradserve.gateway.submit import known_run
from gradserve.gateway.validate.models import checkpoint_name, parse_path, ttl, unknown_checkpoint
from gradserve.store.base import Checkpoint, Run
from gradserve.store.journalled import journalled_op
from gradserve.store.lineage import lineage_of
from gradserve.store.summary import summary_of
from gradserve.store.wakeups import MakeWhole, NameVersion, Rollback
from gradserve.wire.errors import Invalid, NotFound

log = logging.getLogger(__name__)

MAX_CLIENT_STATE = 1 << 20
_BYTES = "application/octet-stream"


class _Named(msgspec.Struct, frozen=True):
    path: str
    version: int
    checkpoint: Checkpoint


async def list_versions(call: Call) -> Response:
    """The durable versions of a run, newest first, and what is stored of it."""
    run = await known_run(call, call.path("run_id"), "run_id")
    versions = await call.store.list_versions(call.tenant, run.id)
    return answer_json({"versions": versions, "stored": await stored_of(call, run)})


async def list_events(call: Call) -> Response:
    """What happened to a run, newest first."""
    run = await known_run(call, call.path("run_id"), "run_id")
    limit, offset = page_of(call.query, 100)
    events, page = await call.store.list_events(call.tenant, run.id, limit, offset)
    return answer_json({"events": events, "cursor": cursor(page)})


async def list_metrics(call: Call) -> Response:
    """What the training requests of a run measured, oldest first."""
    run = await known_run(call, call.path("run_id"), "run_id")
    limit, offset = page_of(call.query, 1000)
    metrics, page = await call.store.list_metrics(call.tenant, run.id, limit, offset)
    return answer_json({"metrics": metrics, "cursor": cursor(page)})


async def lineage(call: Call) -> Response:
    """Where a run's weights come from, step by step back to the base, and which runs began with its own."""
    run = await known_run(call, call.path("run_id"), "run_id")
    return answer_json(await lineage_of(call.store, call.tenant, run))


async def summary(call: Call) -> Response:
    """A step of a run in figures (``?version=``: a number or a checkpoint's name): what ``gradserve diff`` compares."""
    run = await known_run(call, call.path("run_id"), "run_id")
    asked = call.query.get("version")
    version = run.version if asked is None else await _step(call, run.id, int(asked) if asked.isdigit() else asked)
    assert version is not None
    weights = await _weights_at(call, run, version)
    found = await summary_of(call.store, call.tenant, run, version, weights)
    norms = await asyncio.to_thread(_norms, call, weights)
    return answer_json(msgspec.structs.replace(found, norms=norms, stored=await stored_of(call, run)))


async def program(call: Call) -> Response:
    """An Op of a run (``?seq=``; else the newest that trains) as ``gradserve program`` lowers and prints it."""
    run = await known_run(call, call.path("run_id"), "run_id")
    asked = call.query.get("seq")
    if asked is not None and not asked.isdigit():
        raise Invalid("query.seq", f"seq is {asked!r}; it must be a number.", field="seq")
    op = await journalled_op(call.store, call.tenant, run, None if asked is None else int(asked))
    if op is None:
        which = "request that trains" if asked is None else f"request #{asked}"
        raise NotFound("op.unknown", f"No {which} of {run.id} is kept in the journal (any more).", field="seq")
    base = call.gateway.catalog.get(run.base)
    model = None if base is None else await asyncio.to_thread(size_of, base, run.lora)
    return answer_json({"op": op, "task_tokens": call.gateway.settings.tokens_per_task, "model": model})


async def _weights_at(call: Call, run: Run, version: int) -> str | None:
    if version == run.version:
        return run.weights
    saved, _ = await call.store.list_checkpoints(call.tenant, run.id, 1000, 0)
    versions = await call.store.list_versions(call.tenant, run.id)
    kept = [*((one.version, one.weights) for one in versions), *((one.version, one.weights) for one in saved)]
    return next((weights for number, weights in kept if number == version), None)


def _norms(call: Call, weights: str | None) -> dict[str, float] | None:
    if weights is None:
        return None
    try:
        return weight_norms(call.gateway.objects.verified_path(weights))
    except (ObjectMissing, ObjectCorrupt) as error:
        log.error("no norms of %s: %s", weights, error)
        return None


async def name_version(call: Call) -> Response:
    """Give the newest step, or an earlier one, a name: a checkpoint with optimizer moments."""
    run = await known_run(call, call.path("run_id"), "run_id")
    await require_base_of_run(call, run)
    body = await call.json(NameBody)
    version = await _step(call, run.id, body.version)
    name = checkpoint_name(body.name, "name")
    existing = await call.store.get_checkpoint(call.tenant, run.id, "weights", name)
    if existing is not None and existing.version != (run.version if version is None else version):
        raise Invalid(
            "checkpoint.exists",
            f"{existing.path} exists, of step {existing.version}.",
            field="name",
            fix="Choose another name or delete it first.",
        )
    ask = NameVersion(
        call.tenant, run.id, version, name, ttl(body.ttl_seconds), purpose="forked" if body.fork else None
    )
    checkpoint: Checkpoint = await call.gateway.wakeups.ask(ask)
    return answer_json(_Named(checkpoint.path, checkpoint.version, checkpoint))


async def roll_back(call: Call) -> Response:
    """Make an earlier step, or a saved state of the run, its current one."""
    run = await known_run(call, call.path("run_id"), "run_id")
    await require_base_of_run(call, run)
    version = await _step(call, run.id, (await call.json(RollbackBody)).version)
    assert version is not None
    return answer_json({"run": await call.gateway.wakeups.ask(Rollback(call.tenant, run.id, version))})


async def _step(call: Call, run_id: str, version: int | str | None) -> int | None:
    """A number of optimizer steps, or that of the run's checkpoint of this name."""
    if not isinstance(version, str):
        if version is not None and version < 0:
            raise Invalid("version.range", f"version is {version}; steps count from 0.", field="version")
        return version
    for kind in ("weights", "sampler_weights"):
        found = await call.store.get_checkpoint(call.tenant, run_id, kind, version)
        if found is not None:
            return found.version
    raise NotFound("checkpoint.unknown", f"{run_id} has no checkpoint named {version!r}.", field="version")


async def put_client_state(call: Call) -> Response:
    """Keep up to 1 MiB of the client's own with the run; checkpoints that are asked for from now on carry it."""
    run = await known_run(call, call.path("run_id"), "run_id")
    data = await read_body(call.request, MAX_CLIENT_STATE)
    digest = None
    if data:
        digest = call.gateway.objects.put(data)
        await asyncio.to_thread(call.gateway.objects.persist, digest)
    await call.store.set_client_state(call.tenant, run.id, digest)
    return no_content()


async def get_client_state(call: Call) -> Response:
    """What was kept, or with ``?path=`` what a checkpoint carries; empty when there is nothing."""
    run = await known_run(call, call.path("run_id"), "run_id")
    digest = run.client_state
    kept = MakeWhole(call.tenant, run.id, run.id, run.version, {} if digest is None else {digest: "client state"})
    if (path := call.query.get("path")) is not None:
        parts = parse_path(path, "path")
        checkpoint = await call.store.get_checkpoint(call.tenant, parts.run_id, parts.kind, parts.name)
        if checkpoint is None:
            raise unknown_checkpoint(path, "path")
        digest = checkpoint.client_state
        kept = MakeWhole.of(checkpoint, call.tenant, "client state")
    if digest is None:
        return Response(b"", media_type=_BYTES)
    try:
        file = await asyncio.to_thread(call.gateway.objects.verified_path, digest)
    except (ObjectMissing, ObjectCorrupt):
        await call.gateway.wakeups.ask(kept)
        file = await asyncio.to_thread(call.gateway.objects.verified_path, digest)
    return Response(await asyncio.to_thread(file.read_bytes), media_type=_BYTES)


_RUN = "/gradserve/runs/{run_id}"

ROUTES = [
    Api("GET", _RUN + "/versions", list_versions),
    Api("GET", _RUN + "/events", list_events),
    Api("GET", _RUN + "/metrics", list_metrics),
    Api("GET", _RUN + "/lineage", lineage),
    Api("GET", _RUN + "/program", program),
    Api("GET", _RUN + "/summary", summary),
    Api("POST", _RUN + "/name", name_version, NameBody),
    Api("POST", _RUN + "/rollback", roll_back, RollbackBody),
    Api("PUT", _RUN + "/client_state", put_client_state),
    Api("GET", _RUN + "/client_state", get_client_state),
]
