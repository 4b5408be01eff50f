"""gradserve program HASH|RUN"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gradserve.cli.remote import run_route
from gradserve.cli.runs import DATA_DIR
from gradserve.cli.source import open_store, server_url, stored_object
from gradserve.client.extensions import ExtensionError, get
from gradserve.compute.sizes import ModelSize, size_of
from gradserve.orchestration.lower import lower
from gradserve.orchestration.work import GraphWork, Work, work_of
from gradserve.store.journalled import JournalledOp, journalled_op
from gradserve.wire import graph as ir
from gradserve.wire.errors import Invalid, UserError
from gradserve.wire.ops import decode_body

if TYPE_CHECKING:
    from gradserve.compute.engine.graphs import Cost

_HASH = re.compile(r"[0-9a-f]{64}")
_EXAMPLE = {"B": 32, "T": 128}
_EXAMPLE_OTHERS = 16
_UNLIMITED = 1 << 62


class _Found(msgspec.Struct, frozen=True):
    """What a data directory or a server (GET .../runs/{run}/program) knows of an Op."""

    op: JournalledOp
    task_tokens: int
    model: ModelSize | None


@click.command(short_help="Print what a request was lowered to: Tasks, graphs, bytes and FLOPs.")
@click.argument("what", metavar="HASH|RUN")
@click.option("--seq", type=click.IntRange(0), help="Of a run: which request (default: the newest that trains).")
@click.option("--size", "sizes", multiple=True, metavar="NAME=N", help="Of a graph: a size to measure at, B=32.")
@DATA_DIR
def program(what: str, seq: int | None, sizes: tuple[str, ...], data_dir: Path | None) -> None:
    """Print what an Op was lowered to.

    For the HASH of a graph: the graph, and of every operator the shape, bytes and floating-point operations, found by a
    dry run on fake tensors. For a RUN: the Tasks of one of its requests and the Reduce and Checkpoint steps, with bytes
    and FLOPs where sizes alone tell.
    """
    if _HASH.fullmatch(what):
        if seq is not None:
            raise click.UsageError("--seq goes with a RUN")
        asked = _parsed(sizes)
        _show_graph(_graph(data_dir, what), asked)
        return
    if sizes:
        raise click.UsageError("--size goes with the HASH of a graph, 64 hexadecimal digits")
    _show_program(_op(data_dir, what, seq), lambda digest: _graph(data_dir, digest))


def _parsed(sizes: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for text in sizes:
        name, _, number = text.partition("=")
        if not name or not number.isdigit():
            raise click.UsageError(f"--size {text!r} is not NAME=N, B=32 for one")
        found[name] = int(number)
    return found


# What is printed of a graph


def _show_graph(graph: ir.Graph, asked: dict[str, int]) -> None:
    unknown = sorted(asked.keys() - set(graph.symbols))
    if unknown:
        known = ", ".join(graph.symbols) or "none"
        raise click.ClickException(f"the graph {graph.name!r} has no size {unknown[0]}; its sizes are {known}")
    sizes = {name: asked.get(name, _EXAMPLE.get(name, _EXAMPLE_OTHERS)) for name in graph.symbols}
    click.echo(ir.to_text(graph))
    try:
        cost = _measured(graph, sizes)
    except Invalid as error:
        raise click.ClickException(f"it can't be measured at {_words(sizes)}: {error.detail}") from error
    click.echo(f"at {_words(sizes)}")
    rows = [(node.name, node.op, f"{node.dtype}{list(node.shape)}", node.bytes, node.flops) for node in cost.nodes]
    widths = [max((len(str(row[column])) for row in rows), default=0) for column in range(3)]
    for name, op, shape, size, flops in rows:
        click.echo(f"  {name:<{widths[0]}}  {op:<{widths[1]}}  {shape:<{widths[2]}}  bytes={size} flops={flops}")
    click.echo(f"forward   bytes={cost.bytes} flops={cost.flops}")
    if "loss" in cost.outputs:
        click.echo(f"backward  bytes={cost.backward_bytes} flops={cost.backward_flops}")
    click.echo(f"peak      bytes={cost.peak_bytes}")


def _words(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "its fixed sizes"


def _measured(graph: ir.Graph, sizes: dict[str, int]) -> Cost:
    """The cost at these sizes, whatever it is: nothing of it is run. Raises Invalid when it would not run."""
    from gradserve.compute.engine.graphs import Executable, Limits, measure  # torch: only to measure

    unlimited = Limits(_UNLIMITED, _UNLIMITED, _UNLIMITED, seconds=60.0)
    return measure(Executable(graph, max_constant_bytes=ir.MAX_BYTES), sizes, unlimited)


# What is printed of a run


def _show_program(found: _Found, graph_of: Callable[[str], ir.Graph]) -> None:
    op = found.op
    body = decode_body(op.body)
    click.echo(f"{op.kind} #{op.seq} of {op.run.id} at version {op.run.version}: {op.state}")
    try:
        lowered = lower(op.id, body, op.run, found.task_tokens)
    except UserError as error:
        raise click.ClickException(f"#{op.seq} is not lowered: {error.problem().detail}") from error
    graphs = _Graphs(graph_of)
    work = work_of(lowered, found.model or graphs.size_of(op.run.graph), graphs.work, op.transitions)
    click.echo(f"program {lowered.op_id}, cut at {found.task_tokens} tokens")
    for line, each in zip(lowered.lines(), work, strict=True):
        click.echo(f"  {line}  {_figures(each)}")
    if not work:
        click.echo("  nothing to compute: the server does it by itself")
    for digest, graph in graphs.known.items():
        click.echo(f"graph {digest[:8]} = {graph.name}: gradserve program {digest}")


def _figures(work: Work) -> str:
    return f"bytes={_or_dash(work.bytes)} flops={_or_dash(work.flops)}"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


class _Graphs:
    """The graphs that a Program names, each read once and measured at the sizes that a step gives it."""

    def __init__(self, graph_of: Callable[[str], ir.Graph]) -> None:
        self._graph_of = graph_of
        self.known: dict[str, ir.Graph] = {}

    def get(self, digest: str) -> ir.Graph:
        if digest not in self.known:
            self.known[digest] = self._graph_of(digest)
        return self.known[digest]

    def size_of(self, digest: str | None) -> ModelSize | None:
        """Of a module: what it trains."""
        if digest is None:
            return None
        trained = sum(_items(given) for given in self.get(digest).inputs if given.kind == "parameter")
        return ModelSize(0, trained, full=True)

    def work(self, digest: str, shapes: dict[str, tuple[int, ...]]) -> GraphWork | None:
        """None where the shapes do not tell all sizes, or the graph would not run at them."""
        graph = self.get(digest)
        sizes = {name: shape[0] for name, shape in shapes.items() if name in graph.symbols and len(shape) == 1}
        for given in graph.inputs:
            for size, actual in zip(given.shape, shapes.get(given.name, ()), strict=False):
                if isinstance(size, str):
                    sizes[size] = actual
        try:
            cost = _measured(graph, sizes)
        except Invalid:
            return None
        outputs = sum(4 * math.prod(shape) for shape in cost.outputs.values())
        parameters = sum(
            _items(given) * ir.ITEM_BYTES[given.dtype] for given in graph.inputs if given.kind == "parameter"
        )
        return GraphWork(cost.flops, cost.backward_flops, outputs, parameters)


def _items(given: ir.Input) -> int:
    return math.prod(size for size in given.shape if isinstance(size, int))


# Where it is read


def _op(data_dir: Path | None, run_id: str, seq: int | None) -> _Found:
    if (url := server_url(data_dir)) is not None:
        query = "" if seq is None else f"?seq={seq}"
        return msgspec.json.decode(_ask(url, run_route(run_id, f"/program{query}")), type=_Found)
    return asyncio.run(_op_from_disk(data_dir, run_id, seq))


async def _op_from_disk(data_dir: Path | None, run_id: str, seq: int | None) -> _Found:
    from gradserve.compute.catalog import ModelUnusable
    from gradserve.compute.models import find_base
    from gradserve.settings import Settings

    store = open_store(data_dir)
    await store.open()
    try:
        run = await store.get_run(None, run_id)
        if run is None:
            raise click.ClickException(f"there is no run {run_id!r}; gradserve runs lists them")
        op = await journalled_op(store, None, run, seq)
    finally:
        await store.close()
    if op is None:
        which = "request that trains" if seq is None else f"request #{seq}"
        raise click.ClickException(f"no {which} of {run_id} is kept in the journal (any more)")
    settings = Settings()
    try:
        base = None if run.graph else find_base(run.base, settings.models, data_dir or settings.data_dir, _say)
    except ModelUnusable as error:
        _say(f"bytes and FLOPs are not told: {error}")
        base = None
    return _Found(op, settings.tokens_per_task, None if base is None else size_of(base, run.lora))


def _graph(data_dir: Path | None, digest: str) -> ir.Graph:
    """A stored graph, compared with its digest."""
    url = server_url(data_dir)
    text = _ask(url, f"graphs/{digest}") if url is not None else asyncio.run(_graph_from_disk(data_dir, digest))
    if ir.digest(text) != digest:
        raise click.ClickException(f"the stored graph {digest} is damaged: its bytes have another SHA-256")
    return ir.decode(text)


async def _graph_from_disk(data_dir: Path | None, digest: str) -> bytes:
    store = open_store(data_dir)
    await store.open()
    try:
        known = await store.get_graph(None, digest)
    finally:
        await store.close()
    if known is None:
        raise click.ClickException(f"there is no graph {digest}; gradserve program RUN names those of a run")
    return stored_object(data_dir, digest)


def _ask(url: str, path: str) -> bytes:
    try:
        return get(url, path, os.environ.get("TINKER_API_KEY", "tml-local"))
    except ExtensionError as error:
        raise click.ClickException(str(error)) from error


def _say(text: str) -> None:
    click.echo(text, err=True)
