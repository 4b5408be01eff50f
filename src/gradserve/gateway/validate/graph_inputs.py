"""Checks of a training request whose loss is a graph: does every row have what the graph reads, in shape and dtype?"""

from __future__ import annotations

import math

import numpy as np

from gradserve.compute.catalog import BaseFacts
from gradserve.gateway.validate.training import TARGETS, check_targets, check_tokens, where
from gradserve.wire.codec import TrainingRequest
from gradserve.wire.data import Array, Row
from gradserve.wire.errors import Invalid
from gradserve.wire.graph import Graph, Input
from gradserve.wire.losses import computed, key_of
from gradserve.wire.ops import ForwardBackward, LoraConfig, graph_loss


def graph_body(
    request: TrainingRequest, facts: BaseFacts, max_dense_bytes: int, graph: Graph, digest: str
) -> ForwardBackward:
    """The Op of a training request. Raises Invalid naming ``data[i]`` and the field.

    Inputs that the graph does not read are dropped: its parameters say what it depends on.
    """
    settings = request.config.keys() - {"loss_id"}
    if settings:
        name = min(settings)
        raise Invalid(
            "config.unknown",
            f"A loss of your own has no settings, and loss_fn_config.{name} was given.",
            field=f"loss_fn_config.{name}",
            fix="Make it a constant of the function, or an input of every row.",
        )
    if not request.message.data:
        raise Invalid("data.empty", "data has no rows.", field="data", fix="Send at least one.")
    read = [given for given in graph.inputs if given.name not in computed(graph.over)]
    rows = [_needed(i, row, read, graph) for i, row in enumerate(request.rows(max_dense_bytes))]
    check_tokens(rows, facts)
    wide = any(given.name == "logprobs" and _rank(graph, given) == 2 for given in graph.inputs)
    check_targets(rows, facts, wide)
    return ForwardBackward(rows, graph_loss(digest), {}, backward=not request.forward_only, whole=graph.over == "batch")


def check_values(graph: Graph, lora: LoraConfig | None) -> None:
    """Raises Invalid when a loss reads ``values`` of a run without a value head."""
    if graph.over == "batch" and "values" in graph.names("input") and (lora is None or not lora.value_head):
        raise Invalid(
            "loss.no_value_head",
            f"The loss {graph.name} reads values, and this run has no value head.",
            field="loss_fn",
            fix="Make the run by gradserve.create_lora_training_client(service, ..., value_head=True).",
        )


def _rank(graph: Graph, given: Input) -> int:
    """Dimensions of a row's own value."""
    return len(given.shape) - (graph.over == "batch")


def _needed(index: int, row: Row, read: list[Input], graph: Graph) -> Row:
    kept = {TARGETS: _get(index, row, TARGETS, graph.name)}
    if graph.over == "batch" and "mask" in row.inputs and any(given.name == "mask" for given in graph.inputs):
        kept["mask"] = row.inputs["mask"]
        _check_shape(index, row, "mask", Input("mask", "input", "float32", ["T"]), 1)
    for given in read:
        key = key_of(given.name, graph.over)
        kept[key] = _get(index, row, key, graph.name)
        _check_shape(index, row, key, given, _rank(graph, given))
        _check_values(index, key, kept[key], given)
    return Row(row.tokens, kept)


def _get(index: int, row: Row, name: str, loss: str) -> Array:
    if name not in row.inputs:
        raise Invalid(
            "input.missing",
            f"the loss {loss} needs {where(index, name)}.",
            field=where(index, name),
            index=index,
            fix=f"The row has {', '.join(sorted(row.inputs)) or 'no inputs'}.",
        )
    return row.inputs[name]


def _check_shape(index: int, row: Row, name: str, given: Input, rank: int) -> None:
    shape, n = row.inputs[name].shape, row.length
    match rank:
        case 0:
            fits, wanted = math.prod(shape) == 1, "one number"
        case 1:
            fits, wanted = shape == (n,), f"[{n}]"
        case _:
            last = given.shape[-1]
            fits = len(shape) == 2 and shape[0] == n and (isinstance(last, str) or shape[1] == last)
            wanted = f"[{n}, {last}]"
    if not fits:
        raise Invalid(
            "input.shape",
            f"{where(index, name)} has shape {list(shape)}; the loss wants {wanted} (the row has {n} tokens).",
            field=where(index, name),
            index=index,
        )


def _check_values(index: int, name: str, array: Array, given: Input) -> None:
    floats = array.dtype == "float32"
    if given.dtype != "any" and floats != given.dtype.startswith(("float", "bfloat")):
        raise Invalid(
            "input.dtype",
            f"{where(index, name)} is {array.dtype}; the loss takes {given.dtype}.",
            field=where(index, name),
            index=index,
            fix='Say it when the loss is made: gradserve.loss(fn, inputs={"NAME": "int64[token]"}).',
        )
    if floats and not np.isfinite(array.numpy()).all():
        raise Invalid(
            "input.not_finite",
            f"{where(index, name)} contains a number that is not finite.",
            field=where(index, name),
            index=index,
        )
