"""Saving and loading: save_weights, save_weights_for_sampler, save_weights_external, load_weights, weights_info."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from starlette.responses import Response

from gradserve.compute.checkpoints import target_modules
from gradserve.gateway.bodies import (
    LoadWeightsBody,
    PathBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
)
from gradserve.gateway.call import Api, Call, answer_json, decode_json
from gradserve.gateway.routes.models import run_id_of
from gradserve.gateway.routes.sampling import sampler_id_of
from gradserve.gateway.same_base import identity_metadata, require_base_of_checkpoint
from gradserve.gateway.submit import (
    accept,
    consume,
    future_of,
    is_replay,
    live_session,
    make_op,
    open_run,
    submit_to_run,
)
from gradserve.gateway.validate.age import age_recipients
from gradserve.gateway.validate.models import (
    checkpoint_name,
    known_model,
    metadata,
    only_adamw,
    parse_path,
    sequence,
    ttl,
    unknown_checkpoint,
)
from gradserve.store import trained_on
from gradserve.store.base import Checkpoint, Run
from gradserve.wire.errors import Invalid, Unsupported, UserError
from gradserve.wire.ops import LoadWeights, LoraConfig, OpBody, SaveForSampling, SaveWeights, module_graph

Kind = Literal["weights", "sampler_weights", "external_weights"]


async def save_weights(call: Call) -> Response:
    """Name the current weights and moments, and keep them."""
    return await submit_to_run(call, "save_weights", SaveWeightsBody, _training_save)


async def save_for_sampler(call: Call) -> Response:
    """Name the current weights, or open an unnamed sampling session on them."""
    return await submit_to_run(call, "save_weights", SaveForSamplerBody, _sampler_save)


async def save_external(call: Call) -> Response:
    """Name the current weights for download in PEFT form, encrypted with age if recipients are named."""
    return await submit_to_run(call, "save_weights", SaveExternalBody, _external_save)


async def _training_save(call: Call, run: Run, request: SaveWeightsBody) -> OpBody:
    name = checkpoint_name(request.path)
    if not request.overwrite:
        await _refuse_existing(call, run, request.seq_id, "weights", name)
    return SaveWeights(
        name,
        "weights",
        ttl(request.ttl_seconds),
        request.overwrite,
        metadata(request.user_metadata),
        run.client_state,
    )


async def _sampler_save(call: Call, run: Run, request: SaveForSamplerBody) -> OpBody:
    if request.kind == "inflight":
        raise Unsupported(
            "unsupported.inflight",
            "kind 'inflight' (weights that change under a running sampler) is not served.",
            field="kind",
            fix="Send 'snapshot': a new sampling client per save always samples one known version.",
        )
    if (request.path is None) == (request.sampling_session_seq_id is None):
        raise Invalid(
            "save.target",
            "Exactly one of path and sampling_session_seq_id is needed.",
            field="path",
            fix="path names a checkpoint; sampling_session_seq_id opens an unnamed session.",
        )
    if request.sampling_session_seq_id is not None:
        if request.ttl_seconds is not None:
            raise Invalid("checkpoint.ttl", "An unnamed save has no ttl_seconds.", field="ttl_seconds")
        number = sequence(request.sampling_session_seq_id, "sampling_session_seq_id", 0)
        return SaveForSampling(sampler_id_of(run.session_id, number))
    name = checkpoint_name(request.path)
    await _refuse_existing(call, run, request.seq_id, "sampler_weights", name)
    return SaveWeights(name, "sampler_weights", ttl(request.ttl_seconds), user_metadata=metadata(request.user_metadata))


async def _external_save(call: Call, run: Run, request: SaveExternalBody) -> OpBody:
    recipients = age_recipients(request.age_encryption_recipients)
    name = checkpoint_name(request.path)
    await _refuse_existing(call, run, request.seq_id, "external_weights", name)
    return SaveWeights(name, "external_weights", ttl(request.ttl_seconds), user_metadata=recipients)


async def _refuse_existing(call: Call, run: Run, seq: int, kind: Kind, name: str) -> None:
    """A name is used once, unless the request that repeats it is the one that used it."""
    existing = await call.store.get_checkpoint(call.tenant, run.id, kind, name)
    if existing is not None and not await is_replay(call, run.id, seq):
        raise Invalid(
            "checkpoint.exists",
            f"{existing.path} exists.",
            field="path",
            fix="Choose another name, delete it first, or (save_weights only) send overwrite.",
        )


async def load_weights(call: Call) -> Response:
    """Load a checkpoint into a run, or start a run from it."""
    raw = await call.body()
    request = decode_json(raw, LoadWeightsBody)
    by_run = (request.model_id is not None, request.seq_id is not None)
    by_session = (request.session_id is not None, request.model_seq_id is not None)
    if by_run == (True, True) and not any(by_session):
        return await _load_into(call, request, request.model_id or "", request.seq_id or 0)
    if by_session == (True, True) and not any(by_run):
        return await _load_new(call, request, request.session_id or "", request.model_seq_id or 0)
    raise Invalid(
        "load.target",
        "Exactly one of (model_id, seq_id) and (session_id, model_seq_id) is needed.",
        field="model_id",
    )


async def _load_into(call: Call, request: LoadWeightsBody, model_id: str, seq: int) -> Response:
    try:
        sequence(seq, "seq_id", 1)
        run = await open_run(call, model_id)
        _refuse_unserved(request)
        if not await is_replay(call, run.id, seq):
            _check_fits(await _loadable(call, request), run)
    except UserError as error:
        await consume(call, model_id, seq, "load_weights", error)
        raise
    body = LoadWeights(request.path, request.optimizer)
    return future_of(await accept(call, make_op(call, run.id, seq, run.session_id, run.id, body)))


async def _load_new(call: Call, request: LoadWeightsBody, session_id: str, number: int) -> Response:
    run_id = run_id_of(session_id, sequence(number, "model_seq_id", 0))
    await live_session(call, session_id)
    _refuse_unserved(request)
    body = LoadWeights(request.path, request.optimizer, creates=True)
    op = make_op(call, run_id, 0, session_id, run_id, body)
    if await is_replay(call, run_id, 0):
        return future_of(await accept(call, op))
    checkpoint = await _loadable(call, request)
    if request.base_model is not None:
        _check_base(known_model(call.gateway.catalog, request.base_model).name, checkpoint)
    now = time.time()
    run = Run(
        id=run_id,
        tenant=call.tenant,
        session_id=session_id,
        base=checkpoint.base,
        lora=checkpoint.lora,
        created_at=now,
        last_request_at=now,
        user_metadata=metadata(request.user_metadata) | await identity_metadata(call, checkpoint.base),
        parent=checkpoint.path,
        client_state=checkpoint.client_state,
    )
    return future_of(await accept(call, op, run))


def _refuse_unserved(request: LoadWeightsBody) -> None:
    only_adamw(request.optimizer_config, "optimizer_config")
    if request.weights_access_token is not None:
        raise Unsupported(
            "unsupported.access_token",
            "Access tokens for other tenants' weights are not served.",
            field="weights_access_token",
            fix="Ask the owner to publish the checkpoint.",
        )


async def _loadable(call: Call, request: LoadWeightsBody) -> Checkpoint:
    """The checkpoint of a load request, on a base that is offered, with moments if they are asked for."""
    path = parse_path(request.path, "path")
    checkpoint = await call.store.get_checkpoint(call.tenant, path.run_id, path.kind, path.name)
    if checkpoint is None:
        raise unknown_checkpoint(request.path, "path")
    if module_graph(checkpoint.base) is None:
        known_model(call.gateway.catalog, checkpoint.base, "path")
        await require_base_of_checkpoint(call, checkpoint)
    if request.optimizer and path.kind != "weights":
        raise Invalid(
            "load.optimizer",
            f"{request.path} holds no optimizer state.",
            field="optimizer",
            fix="Load a checkpoint made by save_weights, or send optimizer: false.",
        )
    return checkpoint


def _check_fits(checkpoint: Checkpoint, run: Run) -> None:
    _check_base(run.base, checkpoint, "path")
    if _shape(checkpoint.lora) != _shape(run.lora):
        raise Invalid(
            "load.mismatch",
            f"{checkpoint.path} has {_words(checkpoint.lora)}, {run.id} has {_words(run.lora)}.",
            field="path",
            fix="create_training_client_from_state makes a client that fits the checkpoint.",
        )


def _shape(lora: LoraConfig | None) -> LoraConfig | None:
    """What must agree for weights to fit; the seed only made the first ones."""
    return None if lora is None else msgspec.structs.replace(lora, seed=0)


def _words(lora: LoraConfig | None) -> str:
    if lora is None:
        return "all parameters"
    return f"adapters of rank {lora.rank} on {', '.join(target_modules(lora))}"


def _check_base(base: str, checkpoint: Checkpoint, field: str = "base_model") -> None:
    if checkpoint.base != base:
        raise Invalid("load.mismatch", f"{checkpoint.path} was trained on {checkpoint.base}, not {base}.", field=field)


async def weights_info(call: Call) -> Response:
    """What a client must know to load a checkpoint."""
    path = (await call.json(PathBody)).tinker_path
    parts = parse_path(path, "tinker_path")
    checkpoint = await call.store.get_checkpoint(call.tenant, parts.run_id, parts.kind, parts.name)
    if checkpoint is None:
        raise unknown_checkpoint(path, "tinker_path")
    lora, known = checkpoint.lora, await trained_on.of_checkpoint(call.store, checkpoint)
    return answer_json(
        {
            "base_model": checkpoint.base,
            "is_lora": lora is not None,
            "lora_rank": lora.rank if lora else None,
            "train_unembed": lora.train_unembed if lora else None,
            "train_mlp": lora.train_mlp if lora else None,
            "train_attn": lora.train_attn if lora else None,
            "optimizer_config": {"type": "adamw"},
            "trained_on": known,  # ours: gradserve export compares it with the base that it is given
        }
    )


ROUTES = [
    Api("POST", "/save_weights", save_weights, SaveWeightsBody),
    Api("POST", "/save_weights_for_sampler", save_for_sampler, SaveForSamplerBody),
    Api("POST", "/save_weights_external", save_external, SaveExternalBody),
    Api("POST", "/load_weights", load_weights, LoadWeightsBody),
    Api("POST", "/weights_info", weights_info, PathBody),
]
