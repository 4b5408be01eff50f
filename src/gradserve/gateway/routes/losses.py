"""Losses of users that run beside the weights: the public SDK's create_custom_loss."""

from __future__ import annotations

from starlette.responses import Response

from gradserve.gateway.bodies import CreateCustomLossBody
from gradserve.gateway.call import Api, Call
from gradserve.gateway.graphs import check_loss, keep
from gradserve.gateway.submit import accept, future_of, live_session, make_op
from gradserve.gateway.validate.models import sequence
from gradserve.wire import graph as ir
from gradserve.wire.fx import translate
from gradserve.wire.ops import CreateLoss


async def create_custom_loss(call: Call) -> Response:
    """Check and keep a traced loss; the future's result names it for forward_backward."""
    body = await call.json(CreateCustomLossBody)
    seq = sequence(body.custom_loss_seq_id, "custom_loss_seq_id", 0)
    session = await live_session(call, body.session_id)
    graph = translate(body.name, body.inputs, body.graph)
    ir.check_structure(graph)
    check_loss(graph)
    digest = await keep(call, graph)
    op = make_op(call, f"{session.id}:loss", seq, session.id, None, CreateLoss(digest))
    return future_of(await accept(call, op))


ROUTES = [Api("POST", "/create_custom_loss", create_custom_loss, CreateCustomLossBody)]
"""The routes of this file."""
