"""Losses written in NumPy, JAX or TensorFlow, by the client-side road: two requests, the gradient computed here.

    def loss(data, logprobs):                      # JAX: differentiated by jax.value_and_grad
        return -sum((row["advantages"] * logp).sum() for row, logp in zip(data, logprobs))

    training_client.forward_backward_custom(data, gradserve.jax_loss(loss)).result()

``data`` holds one dict per datum: its loss_fn_inputs as arrays of the framework, by name. ``logprobs`` holds one
float32 [N] array per datum, N its tokens. A loss in torch needs none of this: gradserve.loss runs it beside the
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradserve.compiler.capture import name_of

Rows = list[dict[str, Any]]
"""One dict per datum: arrays of a framework by name."""
CustomLoss = Callable[[Sequence[Any], list[Tensor]], tuple[Tensor, dict[str, float]]]
"""What the SDK's forward_backward_custom takes: (data, log-probs) -> (loss, metrics)."""


class ForeignLossError(ValueError):
    """A function returned something that is no loss; the message names it, what it returned and what was expected."""


def numpy_loss(fn: Callable[..., Any]) -> CustomLoss:
    """``fn(data, logprobs) -> (loss, gradients)`` or ``-> (loss, gradients, metrics)`` in NumPy.

    ``gradients`` holds d loss / d logprobs, one array of the same shape for each of ``logprobs``. Calls of the result
    raise ForeignLossError.
    """

    def call(data: Sequence[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        arrays = [logp.detach().numpy() for logp in logprobs]
        returned = fn(_rows(data, np.asarray), arrays)
        if not isinstance(returned, tuple) or len(returned) not in (2, 3):
            _refuse(fn, _kind(returned), "(loss, gradients) or (loss, gradients, metrics)")
        loss, gradients, *metrics = returned
        return _joined(fn, loss, list(gradients), metrics[0] if metrics else {}, logprobs)

    return call


def jax_loss(fn: Callable[..., Any]) -> CustomLoss:
    """``fn(data, logprobs) -> loss`` or ``-> (loss, metrics)`` in JAX; it may be jitted. Needs ``gradserve[jax]``.

    Calls of the result raise ForeignLossError, and what JAX raises.
    """
    import jax

    def call(data: Sequence[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        def pair(arrays: list[Any]) -> tuple[Any, Any]:
            loss, metrics = _pair(fn, fn(rows, arrays))
            loss = jax.numpy.asarray(loss)
            if loss.shape != () or not jax.numpy.issubdtype(loss.dtype, jax.numpy.floating):
                _refuse(fn, f"an array of {loss.dtype}{list(loss.shape)}", "a scalar of a floating dtype")
            return loss, metrics

        rows = _rows(data, jax.numpy.asarray)
        arrays = [_by_dlpack(logp, jax.dlpack.from_dlpack, jax.numpy.asarray) for logp in logprobs]
        (loss, metrics), gradients = jax.value_and_grad(pair, has_aux=True)(arrays)
        return _joined(fn, loss, gradients, metrics, logprobs)

    return call


def tensorflow_loss(fn: Callable[..., Any]) -> CustomLoss:
    """``fn(data, logprobs) -> loss`` or ``-> (loss, metrics)`` in TensorFlow. Needs ``gradserve[tensorflow]``.

    Calls of the result raise ForeignLossError, and what TensorFlow raises.
    """
    import tensorflow as tf

    def call(data: Sequence[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        arrays = [_by_dlpack(logp, _to_tensorflow, tf.convert_to_tensor) for logp in logprobs]
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            loss, metrics = _pair(fn, fn(_rows(data, tf.convert_to_tensor), arrays))
            if not isinstance(loss, tf.Tensor) or loss.shape.rank != 0 or not loss.dtype.is_floating:
                _refuse(fn, _kind(loss), "a scalar tf.Tensor of a floating dtype")
        gradients = tape.gradient(loss, arrays)
        if all(gradient is None for gradient in gradients):
            _refuse(fn, "a loss that does not depend on logprobs", "one that does")
        filled = [
            tf.zeros_like(logp) if gradient is None else tf.convert_to_tensor(gradient)
            for logp, gradient in zip(arrays, gradients, strict=True)
        ]
        return _joined(fn, loss, filled, metrics, logprobs)

    return call


def _rows(data: Sequence[Any], convert: Callable[[NDArray[Any]], Any]) -> Rows:
    return [{name: convert(value.to_numpy()) for name, value in datum.loss_fn_inputs.items()} for datum in data]


def _by_dlpack(tensor: Tensor, share: Callable[[Tensor], Any], copy: Callable[[NDArray[Any]], Any]) -> Any:
    """The framework's array on the tensor's memory, or of a copy where it does not take that memory."""
    try:
        return share(tensor.detach())
    except (BufferError, RuntimeError, TypeError, ValueError):
        return copy(tensor.detach().numpy())


def _to_tensorflow(tensor: Tensor) -> Any:
    import tensorflow as tf

    return tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]


def _pair(fn: Callable[..., Any], returned: Any) -> tuple[Any, Any]:
    """(loss, metrics) of what a function returned."""
    if not isinstance(returned, tuple):
        return returned, {}
    if len(returned) != 2:
        _refuse(fn, f"a tuple of {len(returned)}", "loss or (loss, metrics)")
    return returned[0], returned[1]


class _Given(torch.autograd.Function):
    """A value whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *logprobs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Any, ...]:
        return None, None, *(gradient * outer[0] for gradient in ctx.gradients)


def _joined(
    fn: Callable[..., Any], loss: Any, gradients: list[Any], metrics: Any, logprobs: list[Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Loss and gradients as torch's, so that the SDK's own backward pass finds them."""
    value = np.asarray(loss)
    if value.shape != () or not np.issubdtype(value.dtype, np.number):
        _refuse(fn, f"a loss of {value.dtype}{list(value.shape)}", "a scalar")
    if len(gradients) != len(logprobs):
        _refuse(fn, f"{len(gradients)} gradients", f"one for each of the {len(logprobs)} arrays in logprobs")
    own = [
        _gradient(fn, row, gradient, logp) for row, (gradient, logp) in enumerate(zip(gradients, logprobs, strict=True))
    ]
    total = torch.tensor(float(value))
    found: Tensor = _Given.apply(total, own, *logprobs)  # type: ignore[no-untyped-call]
    return found, _numbers(fn, metrics)


def _gradient(fn: Callable[..., Any], row: int, gradient: Any, logprobs: Tensor) -> Tensor:
    array = np.array(gradient, dtype=np.float32)  # a copy: frameworks' arrays are read-only
    if array.shape != tuple(logprobs.shape):
        _refuse(fn, f"a gradient of shape {list(array.shape)} for data[{row}]", f"shape {list(logprobs.shape)}")
    if not np.isfinite(array).all():
        _refuse(fn, f"a gradient for data[{row}] that is not finite", "finite numbers")
    return torch.from_numpy(array)


def _numbers(fn: Callable[..., Any], metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        _refuse(fn, f"metrics that are a {type(metrics).__name__}", "a dict of numbers")
    found = {}
    for name, value in metrics.items():
        array = np.asarray(value)
        if array.shape != () or array.dtype.kind not in "biuf":
            _refuse(fn, f"the metric {name!r} as {_kind(value)}", "a number")
        found[str(name)] = float(array)
    return found


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + ("" if shape is None else f" of shape {list(shape)}")


def _refuse(fn: Callable[..., Any], returned: str, expected: str) -> NoReturn:
    raise ForeignLossError(f"{name_of(fn)} returned {returned}; it must return {expected}.")
