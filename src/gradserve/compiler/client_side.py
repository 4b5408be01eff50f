"""The client-side road for a loss that can't be captured: log-probs come here, the gradient goes back, in two requests.

It is taken only where it was asked for: ``gradserve.loss(fn, fallback="client")``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradserve.compiler import refusals
from gradserve.compiler.capture import name_of, named_losses
from gradserve.compiler.refusals import CaptureError
from gradserve.wire.graph import Input

_OF_THE_PASS = ("entropy", "topk_logprobs", "hidden")
"""Inputs that only the server has."""


class ClientLoss:
    """A loss for the SDK's forward_backward_custom. ``reason`` says why it can't run beside the weights."""

    def __init__(
        self, fn: Callable[..., Any], inputs: list[Input], settings: Mapping[str, Any], reason: CaptureError
    ) -> None:
        """Raises CaptureError when ``fn`` reads what only the server has."""
        missing = [given.name for given in inputs if given.name in _OF_THE_PASS]
        if missing:
            raise CaptureError(
                f"{name_of(fn)} reads {missing[0]!r}, which only a loss beside the weights can: {reason.reason}",
                reason.cure,
                refusals.place_of_function(fn),
            ) from reason
        self.fn = fn
        self.reason = reason
        self._inputs = inputs
        self._settings = dict(settings)

    def __call__(self, data: Sequence[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The loss of ``data`` (the SDK's Datum) from its log-probs, one float32 [N] tensor each, and its metrics."""
        values = {given.name: self._value(given, data, logprobs) for given in self._inputs}
        found = named_losses(self.fn(**values, **self._settings), self.fn)
        loss: Tensor = found.pop("loss")
        return loss, {name.removeprefix("metrics."): float(value) for name, value in found.items()}

    def _value(self, given: Input, data: Sequence[Any], logprobs: list[Tensor]) -> Tensor:
        """An input as the server would make it (docs/reference/custom-losses.md): padded with 0 to [B, T], or [B]."""
        match given.name:
            case "logprobs":
                return pad_sequence(logprobs, batch_first=True)
            case "lengths":
                return torch.tensor([len(row) for row in logprobs])
            case "mask" if not all("mask" in datum.loss_fn_inputs for datum in data):
                return pad_sequence([torch.ones(len(row)) for row in logprobs], batch_first=True)
        key = "logprobs" if given.name == "old_logprobs" else given.name
        rows = [self._row(index, datum, key, given.dtype) for index, datum in enumerate(data)]
        if len(given.shape) == 1:
            return torch.stack([row.reshape(()) for row in rows])
        return pad_sequence(rows, batch_first=True)

    def _row(self, index: int, datum: Any, key: str, dtype: str) -> Tensor:
        if key not in datum.loss_fn_inputs:
            raise ValueError(f"{name_of(self.fn)} reads {key!r}, and data[{index}].loss_fn_inputs has no such key")
        array = np.array(datum.loss_fn_inputs[key].to_numpy())
        return torch.from_numpy(array).to(getattr(torch, dtype))


def forward_backward(training_client: Any, data: Sequence[Any], loss: Any) -> Any:
    """The SDK's ``forward_backward`` where ``loss`` runs beside the weights, ``forward_backward_custom`` where not.

    ``loss`` is what gradserve.loss, numpy_loss, jax_loss or tensorflow_loss gave, or a name. Returns the SDK's future.
    """
    if isinstance(loss, str):
        return training_client.forward_backward(data, loss)
    return training_client.forward_backward_custom(data, loss)
