"""Graphs that come with requests: looked at once, kept as objects, known by their hash from then on."""

from __future__ import annotations

import asyncio
import time

from gradserve.compute.objects import ObjectMissing
from gradserve.gateway.call import Call
from gradserve.store.base import StoredGraph
from gradserve.store.wakeups import CheckGraph
from gradserve.wire import graph as ir
from gradserve.wire.errors import Invalid, NotFound
from gradserve.wire.graph import Graph

_DIFFERENTIABLE = frozenset({"logprobs", "entropy", "topk_logprobs", "hidden", "values"})


async def keep(call: Call, graph: Graph) -> str:
    """Store a graph whose structure was checked; returns its digest.

    What the tenant has already costs nothing. A new one is dry-run by a worker first. Raises what that found.
    """
    text = ir.encode(graph)
    digest = ir.digest(text)
    if call.gateway.graphs.get(call.tenant, digest) is not None:
        return digest
    if await call.store.get_graph(call.tenant, digest) is None:
        await asyncio.to_thread(_put, call, text)
        await call.gateway.wakeups.ask(CheckGraph(digest))
        await asyncio.to_thread(_put, call, text)  # the check may have waited longer than the janitor does
        await call.store.put_graph(StoredGraph(call.tenant, digest, graph.name, len(text), time.time()))
    call.gateway.graphs.put(call.tenant, digest, graph)
    return digest


def _put(call: Call, text: bytes) -> None:
    call.gateway.objects.persist(call.gateway.objects.put(text))


async def kept(call: Call, digest: str, field: str) -> Graph:
    """The tenant's graph of this digest. Raises NotFound."""
    found = call.gateway.graphs.get(call.tenant, digest)
    if found is not None:
        return found
    if await call.store.get_graph(call.tenant, digest) is None:
        raise NotFound("graph.unknown", f"There is no graph {digest!r}.", field=field)
    try:
        text = await asyncio.to_thread(lambda: call.gateway.objects.verified_path(digest).read_bytes())
    except ObjectMissing as error:
        raise NotFound("graph.lost", f"The graph {digest} is lost.", field=field, fix="Send it again.") from error
    graph = ir.decode(text)
    call.gateway.graphs.put(call.tenant, digest, graph)
    return graph


def loss_from_text(text: str) -> Graph:
    """A graph that came as the name of a loss. Raises Invalid."""
    graph = ir.decode(text)
    ir.check_structure(graph)
    check_loss(graph)
    return graph


def check_loss(graph: Graph) -> None:
    """Raises Invalid unless a graph can be a loss: inputs only, one output ``loss``, the rest metrics."""
    for given in graph.inputs:
        if given.kind != "input":
            raise Invalid(
                "loss.parameter",
                f"The loss {graph.name!r} has a {given.kind}, {given.name!r}: a loss has no weights of its own.",
                field="loss_fn",
                fix="Send constants as loss_fn_inputs, or train a module with gradserve.fit.",
            )
    names = [output.name for output in graph.outputs]
    odd = [name for name in names if name != "loss" and not name.startswith("metrics.")]
    if "loss" not in names or odd:
        raise Invalid(
            "loss.outputs",
            f"The loss {graph.name!r} gives {', '.join(names)}; it must give loss and metrics.NAME.",
            field="loss_fn",
            fix="Return one number, or one number and a dict of numbers.",
        )
    if not {given.name for given in graph.inputs} & _DIFFERENTIABLE:
        raise Invalid(
            "loss.no_logprobs",
            f"The loss {graph.name!r} reads neither logprobs nor anything else that has a gradient.",
            field="loss_fn",
            fix=f"What the weights decide is {', '.join(sorted(_DIFFERENTIABLE))}.",
        )
