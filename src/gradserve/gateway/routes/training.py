"""forward_backward (which is forward too) and optim_step."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.responses import Response

from gradserve.compute.catalog import BaseFacts
from gradserve.gateway.bodies import OptimStepBody
from gradserve.gateway.call import Api, Call, Gateway
from gradserve.gateway.errors import TooLarge
from gradserve.gateway.graphs import keep, kept, loss_from_text
from gradserve.gateway.submit import (
    accept,
    consume,
    future_of,
    make_op,
    open_run,
    submit_to_run,
)
from gradserve.gateway.validate.graph_inputs import check_values, graph_body
from gradserve.gateway.validate.models import adam_params, known_model, only_adamw, sequence
from gradserve.gateway.validate.training import training_body
from gradserve.store.base import Run
from gradserve.wire.codec import TrainingRequest, decode_forward_backward, peek_identity
from gradserve.wire.errors import Invalid, UserError
from gradserve.wire.graph import Graph
from gradserve.wire.losses import LOSSES
from gradserve.wire.ops import ForwardBackward, OpBody, OptimStep

_THREAD_ABOVE_BYTES = 1 << 20
_MAX_TOLD = 4096


async def forward_backward(call: Call) -> Response:
    """Log-probs and, unless forward_only, gradients of a batch. The body is a protobuf ForwardBackwardRequest."""
    request, size = await _read(call)
    try:
        seq = sequence(request.seq_id, "seq_id", 1)
        run = await open_run(call, request.model_id)
        facts = known_model(call.gateway.catalog, run.base, "model_id")
        body = await _checked(call, request, run, facts, size)
    except UserError as error:
        await consume(call, request.model_id, request.seq_id, "forward_backward", error)
        raise
    op = await accept(call, make_op(call, run.id, seq, run.session_id, run.id, body))
    response = future_of(op)
    _tell_note(call.gateway, run.id, body.loss, response)
    return response


async def _read(call: Call) -> tuple[TrainingRequest, int]:
    """The request and its size. Even of a body that can't be read to its end the client counts the seq as used."""
    raw = b""
    try:
        raw = await call.body()
        return decode_forward_backward(raw), len(raw)
    except UserError as error:
        start = error.start if isinstance(error, TooLarge) else raw
        await consume(call, *peek_identity(start), "forward_backward", error)
        raise


async def _checked(call: Call, request: TrainingRequest, run: Run, facts: BaseFacts, size: int) -> ForwardBackward:
    """Large batches are checked beside the event loop, so that others' polls go on."""
    check = partial(training_body, request, facts, call.gateway.settings.max_body_bytes)
    if (found := await _graph(call, request)) is not None:
        check_values(found[0], run.lora)
        check = partial(graph_body, request, facts, call.gateway.settings.max_body_bytes, *found)
    return await asyncio.to_thread(check) if size > _THREAD_ABOVE_BYTES else check()


async def _graph(call: Call, request: TrainingRequest) -> tuple[Graph, str] | None:
    """The loss's graph and digest: sent along as the loss's name, or kept before and named by its id."""
    if request.loss == "custom":
        digest = request.config.get("loss_id")
        if not isinstance(digest, str):
            raise Invalid(
                "loss.id",
                "loss_fn is custom, and loss_fn_config.loss_id does not say which.",
                field="loss_fn_config.loss_id",
                fix="Send what ServiceClient.create_custom_loss returned.",
            )
        return await kept(call, digest, "loss_fn_config.loss_id"), digest
    if not request.loss.startswith("{"):
        return None
    graph = loss_from_text(request.loss)
    return graph, await keep(call, graph)


def _tell_note(gateway: Gateway, run_id: str, loss: str, response: Response) -> None:
    """Give the loss's note to the client, which logs this header as a warning; once per run, not at every step."""
    note = LOSSES[loss].note if loss in LOSSES else ""
    if not note or run_id in gateway.told:
        return
    if len(gateway.told) >= _MAX_TOLD:
        gateway.told.clear()
    gateway.told.add(run_id)
    response.headers["x-deprecation-note"] = note


async def optim_step(call: Call) -> Response:
    """One AdamW step on the accumulated gradients."""
    return await submit_to_run(call, "optim_step", OptimStepBody, _optim_body)


async def _optim_body(call: Call, run: Run, request: OptimStepBody) -> OpBody:
    for field in ("optimizer_params", "optim_params"):
        only_adamw(getattr(request, field), field)
    return OptimStep(adam_params(request.adam_params))


ROUTES = [
    Api("POST", "/forward_backward", forward_backward),
    Api("POST", "/optim_step", optim_step, OptimStepBody),
]
