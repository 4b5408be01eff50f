"""Modules as graphs: a forward pass, or a loss of a module; parameters and buffers are inputs of their own names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradserve.compiler.capture import State, capture, name_of, named_losses
from gradserve.compiler.declare import BATCH
from gradserve.compiler.refusals import CaptureError
from gradserve.wire.graph import MAX_BYTES, Graph, Input


def capture_module(
    module: torch.nn.Module, example: Mapping[str, Tensor] | Tensor, *, batch_dims: Mapping[str, int] | None = None
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of ``module``'s forward pass, and its parameters and buffers by their own names.

    ``example`` is a batch: a tensor for the first parameter of forward, or a dict of tensors: arguments by name, or
    (where forward has no such arguments) the one argument itself. Only dtypes and shapes matter. The size of dimension
    0, or of ``batch_dims[name]``, may differ from run to run. Outputs are ``output`` for a tensor, ``output.0``,
    ``output.1``, ... for a tuple, and a dict's own keys. Raises CaptureError.
    """
    names, call = _calling(module, example)
    tensors = dict(example) if isinstance(example, Mapping) else {names[0]: example}
    state = _state_of(module)
    given = [_batched(name, tensor, (batch_dims or {}).get(name, 0)) for name, tensor in tensors.items()]

    def body(batch: dict[str, Tensor]) -> dict[str, Any]:
        return dict(_named("output", call(batch), top=True))

    graph = _captured(body, type(module).__name__, given, state, module.forward)
    return graph, state.tensors


def capture_program(
    fn: Callable[..., Any],
    module: torch.nn.Module,
    example_batch: Mapping[str, Tensor],
    *,
    batch_dims: Mapping[str, int] | None = None,
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of ``fn(module, batch) -> loss`` or ``-> (loss, metrics)``, and the module's parameters and buffers.

    ``example_batch`` as for :func:`capture_module`; outputs are ``loss`` and ``metrics.NAME``. Raises CaptureError.
    """
    state = _state_of(module)
    given = [_batched(name, tensor, (batch_dims or {}).get(name, 0)) for name, tensor in example_batch.items()]

    def body(batch: dict[str, Tensor]) -> dict[str, Any]:
        return named_losses(fn(module, batch), fn)

    return _captured(body, name_of(fn), given, state, fn), state.tensors


def _captured(
    body: Callable[[dict[str, Tensor]], dict[str, Any]],
    name: str,
    given: list[Input],
    state: State,
    user: Callable[..., Any],
) -> Graph:
    twice = {each.name for each in given} & {each.name for each in state.inputs}
    if twice:
        raise CaptureError(f"{min(twice)!r} is the name of an input and of a parameter or buffer.", "Rename the input.")
    return capture(body, name, given, user=user, state=state, max_constant_bytes=MAX_BYTES)


def _calling(
    module: torch.nn.Module, example: Mapping[str, Tensor] | Tensor
) -> tuple[list[str], Callable[[dict[str, Tensor]], Any]]:
    """Names of forward's parameters, and how to call the module on a dict of inputs."""
    names = list(inspect.signature(module.forward).parameters)
    if isinstance(example, Tensor):
        return names, lambda batch: module(batch[names[0]])
    if set(example) <= set(names):
        return names, lambda batch: module(**batch)
    return names, lambda batch: module(batch)


def _batched(name: str, tensor: Tensor, batch_dim: int) -> Input:
    shape: list[int | str] = list(tensor.shape)
    if shape:
        shape[batch_dim] = BATCH
    return Input(name, "input", _dtype(tensor), shape)


def _state_of(module: torch.nn.Module) -> State:
    """Parameters that require a gradient are trained; all else is a buffer."""
    state = State(module)
    first: dict[int, str] = {}
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        owner = first.setdefault(id(tensor), name)
        state.names[name] = owner
        if owner == name:
            kind: Any = "parameter" if tensor.requires_grad else "buffer"
            state.inputs.append(Input(name, kind, _dtype(tensor), list(tensor.shape)))
            state.tensors[name] = tensor.detach()
    return state


def _named(name: str, value: Any, top: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors in what a module returned, each with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _named(f"{name}.{position}", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(str(key) if top else f"{name}.{key}", item)
    elif value is not None:
        raise CaptureError(
            f"The module returns a {type(value).__name__}.",
            "Return tensors, in a tuple or a dict (of a distribution: its logits, or its mean and standard deviation).",
        )


def _dtype(tensor: Tensor) -> Any:
    return str(tensor.dtype).removeprefix("torch.")
