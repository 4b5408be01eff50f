"""forward_backward (which is forward too) and optim_step."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from gradserve.compute.catalog import BaseFacts
from gradserve.gateway.bodies import OptimStepBody
from gradserve.gateway.call import Api, Call, Gateway
from gradserve.gateway.errors import TooLarge
from gradserve.gateway.submit import (
    accept,
    consume,
    future_of,
    make_op,
    open_run,
    submit_to_run,
)
from gradserve.gateway.validate.models import adam_params, known_model, only_adamw, sequence
from gradserve.gateway.validate.training import training_body
from gradserve.store.base import Run
from gradserve.wire.codec import TrainingRequest, decode_forward_backward, peek_identity
from gradserve.wire.errors import UserError
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
        body = await _checked(request, facts, call.gateway.settings.max_body_bytes, size)
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


async def _checked(request: TrainingRequest, facts: BaseFacts, max_dense: int, size: int) -> ForwardBackward:
    """Large batches are checked beside the event loop, so that others' polls go on."""
    if size > _THREAD_ABOVE_BYTES:
        return await asyncio.to_thread(training_body, request, facts, max_dense)
    return training_body(request, facts, max_dense)


def _tell_note(gateway: Gateway, run_id: str, loss: str, response: Response) -> None:
    """Give the loss's note to the client, which logs this header as a warning; once per run, not at every step."""
    note = LOSSES[loss].note
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
