"""Sampling sessions and samples. asample is the hottest path: a cached lookup, one read and one write of the store."""

from __future__ import annotations

import time

from starlette.responses import Response

from gradserve.gateway.bodies import CreateSamplingSessionBody, SampleBody, SamplerBody
from gradserve.gateway.call import Api, Call, answer_json
from gradserve.gateway.same_base import require_base_of_checkpoint, require_base_of_sampler
from gradserve.gateway.submit import Future, accept, live_session, make_op
from gradserve.gateway.validate.models import known_model, parse_path, sequence, unknown_checkpoint
from gradserve.gateway.validate.sampling import sample_body, without_session
from gradserve.store.base import Checkpoint, IdentityConflict, SamplingSession
from gradserve.wire.errors import Invalid, NotFound

_MAX_CACHED = 4096


def sampler_id_of(session_id: str, number: int) -> str:
    """The id of a session's n-th sampling session."""
    return f"{session_id}:sample:{number}"


async def create_sampling_session(call: Call) -> Response:
    """Fix a base model or a checkpoint to sample from."""
    body = await call.json(CreateSamplingSessionBody)
    sampler_id = sampler_id_of(body.session_id, sequence(body.sampling_session_seq_id, "sampling_session_seq_id", 0))
    await live_session(call, body.session_id)
    checkpoint = None if body.model_path is None else await _checkpoint(call, body.model_path)
    if checkpoint is None and body.base_model is None:
        raise Invalid("sampler.target", "One of base_model and model_path is needed.", field="base_model")
    base = checkpoint.base if checkpoint is not None else body.base_model or ""
    facts = known_model(call.gateway.catalog, base)
    if body.base_model is not None and known_model(call.gateway.catalog, body.base_model) is not facts:
        raise Invalid(
            "load.mismatch",
            f"{body.model_path} was trained on {base}, not {body.base_model}.",
            field="base_model",
        )
    sampler = SamplingSession(
        id=sampler_id,
        tenant=call.tenant,
        session_id=body.session_id,
        base=facts.name,
        created_at=time.time(),
        weights=checkpoint.weights if checkpoint else None,
        run_id=checkpoint.run_id if checkpoint else None,
        run_version=checkpoint.version if checkpoint else None,
        model_path=body.model_path,
    )
    try:
        await call.store.put_sampling_session(sampler)
    except IdentityConflict as conflict:
        raise Invalid(
            "op.conflict",
            f"{sampler_id} was already opened on something else.",
            field="sampling_session_seq_id",
            fix="Use a new number.",
        ) from conflict
    return answer_json({"type": "create_sampling_session", "sampling_session_id": sampler_id})


async def _checkpoint(call: Call, model_path: str) -> Checkpoint:
    path = parse_path(model_path, "model_path")
    checkpoint = await call.store.get_checkpoint(call.tenant, path.run_id, path.kind, path.name)
    if checkpoint is None:
        raise unknown_checkpoint(model_path, "model_path")
    await require_base_of_checkpoint(call, checkpoint)
    return checkpoint


async def _known_sampler(call: Call, sampler_id: str) -> SamplingSession:
    sampler = await call.store.get_sampling_session(call.tenant, sampler_id)
    if sampler is None:
        raise NotFound("sampler.unknown", f"There is no sampling session {sampler_id!r}.", field="sampling_session_id")
    return sampler


async def _cached_sampler(call: Call, sampler_id: str) -> SamplingSession:
    cache, key = call.gateway.samplers, (call.tenant, sampler_id)
    sampler = cache.get(key)
    if sampler is None:
        sampler = await _known_sampler(call, sampler_id)
        await require_base_of_sampler(call, sampler)
        if len(cache) >= _MAX_CACHED:
            cache.clear()
        cache[key] = sampler
    return sampler


async def get_sampler(call: Call) -> Response:
    """What a sampling session samples from."""
    sampler = await _known_sampler(call, call.path("sampler_id"))
    # The SDK's sampling client knows no other name for its tokenizer.
    local = call.gateway.settings.on_loopback
    base = call.gateway.catalog.tokenizer_source(sampler.base) if local else sampler.base
    return answer_json({"sampler_id": sampler.id, "base_model": base, "model_path": sampler.model_path})


async def join_sampling_session(call: Call) -> Response:
    """A number for one more client of a sampling session, so that their seqs never meet."""
    sampler_id = (await call.json(SamplerBody)).sampling_session_id
    counter = await call.store.join_sampling_session(call.tenant, sampler_id)
    if counter is None:
        await _known_sampler(call, sampler_id)
    return answer_json({"type": "join_sampling_session", "client_counter": counter})


async def asample(call: Call) -> Response:
    """Continue a prompt."""
    body = await call.json(SampleBody)
    if body.sampling_session_id is None:
        raise without_session()
    seq = sequence(body.seq_id, "seq_id", 0)
    sampler = await _cached_sampler(call, body.sampling_session_id)
    await live_session(call, sampler.session_id)
    facts = known_model(call.gateway.catalog, sampler.base, "sampling_session_id")
    sample = sample_body(body, sampler, seq, facts)
    op = await accept(call, make_op(call, sampler.id, seq, sampler.session_id, sampler.run_id, sample))
    sequence_ids = [f"{sampler.id}:{seq}:{index}" for index in range(sample.num_samples)]
    return answer_json(Future(op.id, sample_sequence_ids=sequence_ids))


ROUTES = [
    Api("POST", "/create_sampling_session", create_sampling_session, CreateSamplingSessionBody),
    Api("GET", "/samplers/{sampler_id}", get_sampler),
    Api("POST", "/join_sampling_session", join_sampling_session, SamplerBody),
    Api("POST", "/asample", asample, SampleBody),
]
