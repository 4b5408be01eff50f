"""A loss function becomes a graph, and a graph a string: what the unmodified SDK sends as ``loss_fn``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from gradserve.compiler import refusals
from gradserve.compiler.declare import BATCH, TOKENS, declared, symbols_of
from gradserve.compiler.lowering import Lowering
from gradserve.compiler.refusals import CaptureError
from gradserve.compiler.tracing import Traced, trace
from gradserve.wire.graph import FORMAT, Graph, Input, Output, check_structure, decode, digest, encode

_ROWS = (240, 20160)
"""Example numbers of rows: the first is cut evenly by most group sizes, the second by 7, 9 and 64 too."""
_OTHER_SIZES = (13, 11, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
"""Of T, then of other symbols. Distinct primes, so that no two sizes are taken for the same."""


def capture_loss(
    fn: Callable[..., Any], *, inputs: Mapping[str, str] | None = None, settings: Mapping[str, Any] | None = None
) -> Graph:
    """The graph of ``fn(logprobs, mask, ...) -> loss`` or ``-> (loss, {"name": scalar, ...})``.

    Parameters are inputs by name (docs/reference/custom-losses.md), float32 [B, T] unless ``inputs`` declares
    otherwise: ``{"group": "int64[row]", "x": "float32[token, 5]"}``. A parameter with a default is no input but a
    setting, whose value (``settings`` replaces it) becomes part of the graph. Outputs are ``loss`` and
    ``metrics.NAME``. Raises CaptureError with the user's file and line.
    """
    given, constants = _parameters(fn, dict(inputs or {}), dict(settings or {}))

    def body(batch: dict[str, Tensor]) -> dict[str, Any]:
        return _named(fn(**batch, **constants), fn)

    for rows in _ROWS:
        batch, dynamic = _example(given, rows)
        try:
            traced = trace(body, batch, dynamic, user=fn)
            break
        except CaptureError as error:
            # Groups of a size that does not divide the example are no fault of the user's.
            if rows == _ROWS[-1] or not error.reason.startswith("RuntimeError"):
                raise
    return graph_of_batch(traced, _name(fn), given)


class Loss(str):
    """A captured loss: the text of its graph, so that it can stand where the SDK expects a loss's name.

    ``graph`` is that text decoded, ``digest`` its name among the server's objects, ``fn`` the Python function.
    """

    graph: Graph
    digest: str
    fn: Callable[..., Any]

    def __new__(cls, graph: Graph, fn: Callable[..., Any]) -> Loss:
        text = encode(graph)
        made = super().__new__(cls, text.decode())
        made.graph = graph
        made.digest = digest(text)
        made.fn = fn
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_text, (str(self), self.fn)


def loss(fn: Callable[..., Any], *, inputs: Mapping[str, str] | None = None, **settings: Any) -> Loss:
    """A loss that runs beside the weights: ``training_client.forward_backward(data, gradserve.loss(my_loss))``.

    Arguments as for :func:`capture_loss`: ``loss(ppo, clip=0.1)`` captures ``ppo`` with its setting ``clip`` at 0.1.
    """
    return Loss(capture_loss(fn, inputs=inputs, settings=settings), fn)


def graph_of_batch(traced: Traced, name: str, given: list[Input]) -> Graph:
    """The graph of a traced function of a dict of tensors, given in order."""
    lowering = Lowering([each.name for each in given], traced.places)
    bindings = [{"ref": each.name} for each in given]
    values = []
    waiting = iter(bindings)
    for spec in traced.program.graph_signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            values.append(next(waiting))
        else:
            assert spec.target is not None
            values.append(lowering.constant(_constant_name(spec.target), _tensor(traced, spec.target)))
    module = traced.program.graph_module
    results = lowering.block(module.graph, module, values)
    nodes, constants = lowering.used(results)
    outputs = [Output(each, result) for each, result in zip(traced.outputs, results, strict=True)]
    graph = Graph(FORMAT, name, "batch", symbols_of(given), given, constants, nodes, outputs)
    check_structure(graph)
    return graph


def _parameters(
    fn: Callable[..., Any], inputs: dict[str, str], settings: dict[str, Any]
) -> tuple[list[Input], dict[str, Any]]:
    """The inputs of a function and the values of its settings."""
    place = refusals.place_of_function(fn)
    given, constants = [], {}
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise CaptureError(
                f"A loss's inputs are its parameters' names; {parameter} has none.",
                "Write each input as a parameter of its own.",
                place,
            )
        if parameter.default is not parameter.empty and name not in inputs:
            constants[name] = settings.pop(name, parameter.default)
        else:
            given.append(declared(name, inputs.pop(name, None)))
    if inputs or settings:
        unknown = next(iter([*inputs, *settings]))
        raise CaptureError(f"{_name(fn)} has no parameter {unknown!r} to declare or set.", place=place)
    return given, constants


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


def _named(result: Any, fn: Callable[..., Any]) -> dict[str, Any]:
    """``loss`` and ``metrics.NAME`` of what a loss returned."""
    place = refusals.place_of_function(fn)
    total, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(total, Tensor) or total.ndim != 0:
        shown = f"a tensor of {total.ndim} dimensions" if isinstance(total, Tensor) else type(total).__name__
        raise CaptureError(
            f"{_name(fn)} must return a scalar tensor, or one and a dict of metrics; it returned {shown}.",
            "End with .sum() or .mean().",
            place,
        )
    if not isinstance(metrics, dict):
        raise CaptureError(f"{_name(fn)} must return its metrics as a dict, not {type(metrics).__name__}.", place=place)
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


def _from_text(text: str, fn: Callable[..., Any]) -> Loss:
    return Loss(decode(text), fn)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _tensor(traced: Traced, target: str) -> Tensor:
    found = traced.program.constants.get(target)
    return found if isinstance(found, Tensor) else traced.program.state_dict[target]


def _constant_name(target: str) -> str:
    return target.rsplit(".", 1)[-1].replace("lifted_tensor_", "constant_")
