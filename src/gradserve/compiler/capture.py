"""A function of a dict of named tensors becomes a graph: what losses, modules and programs have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from gradserve.compiler import refusals
from gradserve.compiler.declare import BATCH, TOKENS, symbols_of
from gradserve.compiler.lowering import Lowering
from gradserve.compiler.refusals import CaptureError
from gradserve.compiler.tracing import OWNER, Traced, trace
from gradserve.wire.errors import Invalid
from gradserve.wire.graph import FORMAT, MAX_CONSTANT_BYTES, Graph, Input, Output, check_structure

_ROWS = (240, 20160)
"""Example numbers of rows: the first is cut evenly by most group sizes, the second by 7, 9 and 64 too."""
_OTHER_SIZES = (13, 11, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
"""Of T, then of other symbols. Distinct primes, so that no two sizes are taken for the same."""

Body = Callable[[dict[str, Tensor]], dict[str, Any]]


@dataclass(frozen=True)
class State:
    """A module's parameters and buffers: ``inputs`` that stand for them and their ``tensors``, by name.

    ``names`` maps every name of a parameter or buffer to that of its input; tied ones share the first one's.
    """

    module: torch.nn.Module | None = None
    inputs: list[Input] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def capture(
    body: Body,
    name: str,
    given: list[Input],
    *,
    user: Callable[..., Any],
    state: State | None = None,
    max_constant_bytes: int = MAX_CONSTANT_BYTES,
) -> Graph:
    """The graph of ``body``, whose dict of inputs is ``given``, and of the module in ``state``. Raises CaptureError.

    ``user`` is the function to name where nothing more exact is known.
    """
    state = state or State()
    graph = _lowered(_traced(body, given, state, user), name, given, state)
    try:
        check_structure(graph, max_constant_bytes=max_constant_bytes)
    except Invalid as error:
        raise CaptureError(error.detail, error.fix, refusals.place_of_function(user)) from None
    return graph


def _traced(body: Body, given: list[Input], state: State, user: Callable[..., Any]) -> Traced:
    first, second = _ROWS
    try:
        return trace(body, *_example(given, first), module=state.module, user=user)
    except CaptureError as error:
        # Groups of a size that does not divide the example are no fault of the user's.
        if not error.reason.startswith("RuntimeError"):
            raise
    return trace(body, *_example(given, second), module=state.module, user=user)


def _example(given: list[Input], rows: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors to trace with, and which of their sizes differ from request to request."""
    others = [symbol for symbol in symbols_of(given) if symbol not in (BATCH, TOKENS)]
    sizes = {BATCH: rows} | dict(zip([TOKENS, *others], _OTHER_SIZES, strict=False))
    batch, dynamic = {}, {}
    for each in given:
        shape = [sizes[size] if isinstance(size, str) else size for size in each.shape]
        tensor = torch.ones(shape, dtype=getattr(torch, each.dtype))
        batch[each.name] = tensor.requires_grad_(tensor.is_floating_point())
        dynamic[each.name] = {i: Dim.DYNAMIC for i, size in enumerate(each.shape) if isinstance(size, str)}
    return batch, dynamic


def _lowered(traced: Traced, name: str, given: list[Input], state: State) -> Graph:
    inputs = [*given, *state.inputs]
    lowering = Lowering([each.name for each in inputs], traced.places)
    waiting = iter(given)
    values = []
    for spec in traced.program.graph_signature.input_specs:
        if spec.target is None:
            values.append({"ref": next(waiting).name})
        elif (known := state.names.get(spec.target.removeprefix(OWNER))) is not None:
            values.append({"ref": known})
        else:
            values.append(lowering.constant(_constant_name(spec.target), traced.tensor(spec.target)))
    module = traced.program.graph_module
    results = lowering.block(module.graph, module, values)
    nodes, constants = lowering.used(results)
    outputs = [Output(each, result) for each, result in zip(traced.outputs, results, strict=True)]
    return Graph(FORMAT, name, "batch", symbols_of(inputs), inputs, constants, nodes, outputs)


def _constant_name(target: str) -> str:
    return target.rsplit(".", 1)[-1].replace("lifted_tensor_", "constant_")


def named_losses(result: Any, fn: Callable[..., Any]) -> dict[str, Any]:
    """``loss`` and ``metrics.NAME`` of what a loss returned."""
    place = refusals.place_of_function(fn)
    total, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(total, Tensor) or total.ndim != 0:
        shown = f"a tensor of {total.ndim} dimensions" if isinstance(total, Tensor) else type(total).__name__
        raise CaptureError(
            f"{name_of(fn)} must return a scalar tensor, or one and a dict of metrics; it returned {shown}.",
            "End with .sum() or .mean().",
            place,
        )
    if not isinstance(metrics, dict):
        raise CaptureError(
            f"{name_of(fn)} must return its metrics as a dict, not {type(metrics).__name__}.", place=place
        )
    return {"loss": total} | {f"metrics.{name}": _metric(name, value, fn) for name, value in metrics.items()}


def _metric(name: str, value: Any, fn: Callable[..., Any]) -> Tensor:
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value))
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.detach()
    shown = f"a tensor of {value.ndim} dimensions" if isinstance(value, Tensor) else type(value).__name__
    raise CaptureError(
        f"Metric {name!r} must be a scalar tensor, not {shown}.",
        "Take its .mean() or .sum().",
        refusals.place_of_function(fn),
    )


def name_of(fn: Callable[..., Any]) -> str:
    """A function's name for people."""
    return getattr(fn, "__name__", type(fn).__name__)
