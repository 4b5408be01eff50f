"""Checks that torch leaves to its Python modules and an operator called by itself goes without.

nn.LSTM compares the sizes of its states and weights before it calls aten.lstm, and the operator believes it: with a
state of another batch size torch 2.13 writes past the end of a buffer (found by tests/graphs/test_fuzz.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

_GATES: Final = {"aten.lstm": 4, "aten.gru": 3, "aten.rnn_tanh": 1, "aten.rnn_relu": 1}


def guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, its arguments checked before where torch does not. ``name`` is ``aten.lstm`` and the like."""
    gates = _GATES.get(name)
    if gates is None:
        return call

    def checked(*args: Any) -> Any:
        _check_recurrent(gates, *args)
        return call(*args)

    return checked


def _check_recurrent(
    gates: int,
    given: Tensor,
    state: Tensor | list[Tensor],
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> None:
    """``given`` [B, T, I] or [T, B, I], states [layers * directions, B, H]; weights as nn.RNNBase orders them.

    Raises ValueError where a size or dtype does not fit.
    """
    directions = 2 if bidirectional else 1
    per_direction = 4 if has_biases else 2
    states = state if isinstance(state, list) else [state]
    if given.ndim != 3 or len(states) != (2 if gates == _GATES["aten.lstm"] else 1):
        raise ValueError("it takes an input of three dimensions and its states")
    if layers < 1 or len(weights) != layers * directions * per_direction or weights[1].ndim != 2:
        raise ValueError(f"{layers} layers do not take {len(weights)} weights")
    hidden = weights[1].shape[1]
    batch = given.shape[0 if batch_first else 1]
    expected: list[tuple[Tensor, tuple[int, ...]]] = [(each, (layers * directions, batch, hidden)) for each in states]
    for start in range(0, len(weights), per_direction):
        width = given.shape[2] if start < directions * per_direction else hidden * directions
        shapes: list[tuple[int, ...]] = [
            (gates * hidden, width),
            (gates * hidden, hidden),
            (gates * hidden,),
            (gates * hidden,),
        ]
        expected += zip(weights[start : start + per_direction], shapes, strict=False)
    for tensor, shape in expected:
        if tuple(tensor.shape) != shape or tensor.dtype != given.dtype:
            raise ValueError(f"a state or weight is {list(tensor.shape)} where {list(shape)} is needed")
