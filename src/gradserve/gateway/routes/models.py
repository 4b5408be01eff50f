"""Runs are born here: create_model. (load_weights can create one too, see weights.)"""

from __future__ import annotations

import time

import msgspec
import psutil
from starlette.responses import Response

from gradserve.gateway.bodies import CreateModelBody, ModelBody
from gradserve.gateway.call import Api, Call, answer_json
from gradserve.gateway.same_base import identity_metadata
from gradserve.gateway.submit import accept, future_of, is_replay, known_run, live_session, make_op
from gradserve.gateway.validate.full import full_parameters_fit, trains_all_parameters
from gradserve.gateway.validate.models import known_model, lora_config, metadata, only_adamw, sequence
from gradserve.store.base import Run
from gradserve.wire.ops import CreateModel


class ModelData(msgspec.Struct, frozen=True):
    """What the client needs to load a tokenizer."""

    arch: str | None
    model_name: str
    tokenizer_id: str


class ModelInfo(msgspec.Struct, frozen=True):
    """The answer of get_info."""

    model_id: str
    model_data: ModelData
    model_name: str
    lora_rank: int | None
    is_lora: bool
    type: str = "get_info"


def run_id_of(session_id: str, model_seq: int) -> str:
    """The client makes the same id by itself."""
    return f"{session_id}:train:{model_seq}"


async def create_model(call: Call) -> Response:
    """Start a run: fresh adapters on a base model, or (an extension) all of its parameters."""
    body = await call.json(CreateModelBody)
    run_id = run_id_of(body.session_id, sequence(body.model_seq_id, "model_seq_id", 0))
    session = await live_session(call, body.session_id)
    facts = known_model(call.gateway.catalog, body.base_model)
    only_adamw(body.optimizer_config, "optimizer_config")
    if trains_all_parameters(body.gradserve, body.lora_config):
        lora = None
        if not await is_replay(call, run_id, 0):
            objects = call.gateway.objects
            full_parameters_fit(facts, psutil.virtual_memory().available, objects.free_fast_bytes())
    else:
        value_head = body.gradserve is not None and body.gradserve.value_head
        lora = lora_config(body.lora_config, call.gateway.settings.max_lora_rank, run_id, value_head=value_head)
    now = time.time()
    run = Run(
        id=run_id,
        tenant=call.tenant,
        session_id=session.id,
        base=facts.name,
        lora=lora,
        created_at=now,
        last_request_at=now,
        user_metadata=metadata(body.user_metadata) | await identity_metadata(call, facts.name),
    )
    op = make_op(call, run_id, 0, session.id, run_id, CreateModel(facts.name, lora))
    return future_of(await accept(call, op, run))


async def get_info(call: Call) -> Response:
    """The base model and adapters of a run."""
    run = await known_run(call, (await call.json(ModelBody)).model_id)
    facts = call.gateway.catalog.get(run.base)
    # A client on this machine can read the tokenizer where the model is; one elsewhere knows only the name.
    # A sampling client that the SDK makes of this run looks for its tokenizer under model_data.model_name.
    local = facts is not None and call.gateway.settings.on_loopback
    data = ModelData(
        arch=facts.family if facts else None,
        model_name=call.gateway.catalog.tokenizer_source(run.base) if local else run.base,
        tokenizer_id=facts.path if facts is not None and local else run.base,
    )
    return answer_json(ModelInfo(run.id, data, run.base, run.lora.rank if run.lora else None, run.lora is not None))


ROUTES = [
    Api("POST", "/create_model", create_model, CreateModelBody),
    Api("POST", "/get_info", get_info, ModelBody),
]
