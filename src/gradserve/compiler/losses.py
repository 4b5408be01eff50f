"""A loss function becomes a graph, and a graph a string: what the unmodified SDK sends as ``loss_fn``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from torch import Tensor

from gradserve.compiler import refusals
from gradserve.compiler.capture import capture, name_of, named_losses
from gradserve.compiler.client_side import ClientLoss
from gradserve.compiler.declare import declared
from gradserve.compiler.refusals import CaptureError
from gradserve.wire.graph import Graph, Input, decode, digest, encode


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
    return capture(lambda batch: named_losses(fn(**batch, **constants), fn), name_of(fn), given, user=fn)


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


@overload
def loss(
    fn: Callable[..., Any], *, inputs: Mapping[str, str] | None = None, fallback: None = None, **settings: Any
) -> Loss: ...
@overload
def loss(
    fn: Callable[..., Any], *, inputs: Mapping[str, str] | None = None, fallback: Literal["client"], **settings: Any
) -> Loss | ClientLoss: ...
def loss(
    fn: Callable[..., Any],
    *,
    inputs: Mapping[str, str] | None = None,
    fallback: Literal["client"] | None = None,
    **settings: Any,
) -> Loss | ClientLoss:
    """A loss that runs beside the weights: ``training_client.forward_backward(data, gradserve.loss(my_loss))``.

    Arguments as for :func:`capture_loss`: ``loss(ppo, clip=0.1)`` captures ``ppo`` with its setting ``clip`` at 0.1.
    With ``fallback="client"`` a function that can't be captured becomes a ClientLoss, with a warning that says why;
    ``gradserve.forward_backward(training_client, data, loss)`` takes either.
    """
    if fallback not in (None, "client"):
        raise ValueError(f"fallback is {fallback!r}; it may be 'client', or left out")
    try:
        return Loss(capture_loss(fn, inputs=inputs, settings=settings), fn)
    except CaptureError as error:
        if fallback is None:
            raise
        given, constants = _parameters(fn, dict(inputs or {}), dict(settings))
        found = ClientLoss(fn, given, constants, error)
        warnings.warn(f"{name_of(fn)} runs on the client, in two requests instead of one: {error}", stacklevel=2)
        return found


def capture_batch_loss(
    fn: Callable[[dict[str, Tensor]], Any], inputs: Mapping[str, str], user: Callable[..., Any]
) -> Loss:
    """The loss of a function of one dict, whose ``inputs`` are all declared: ``{"logprobs": "float32[token]"}``.

    ``user`` is the function to name in a refusal. Raises CaptureError.
    """
    given = [declared(name, text) for name, text in inputs.items()]
    return Loss(capture(lambda batch: named_losses(fn(batch), user), name_of(user), given, user=user), user)


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
        raise CaptureError(f"{name_of(fn)} has no parameter {unknown!r} to declare or set.", place=place)
    return given, constants


def _from_text(text: str, fn: Callable[..., Any]) -> Loss:
    return Loss(decode(text), fn)
