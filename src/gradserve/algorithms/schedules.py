"""Values that change while a training goes on: a number, ``"linear_1e-3"``, or a function of progress."""

from __future__ import annotations

from collections.abc import Callable

Schedule = float | str | Callable[[float], float]
"""A constant; ``linear_X``, which falls from X to 0; or a function of the fraction of the training that is done."""

_LINEAR = "linear_"
_LEAST_LEFT = 1e-6
"""Of a linear schedule's last value: a learning rate or a clip range of exactly zero is none."""


def linear(first: float) -> str:
    """The schedule that falls from ``first`` to 0.

    >>> linear(0.001)
    'linear_0.001'
    """
    return f"{_LINEAR}{first!r}"


def value_at(schedule: Schedule, done: float) -> float:
    """The value when the fraction ``done`` of the training is behind. Raises ValueError for a text it can't read.

    >>> value_at("linear_0.5", 0.75)
    0.125
    """
    if callable(schedule):
        return float(schedule(done))
    if not isinstance(schedule, str):
        return float(schedule)
    try:
        first = float(schedule.removeprefix(_LINEAR))
    except ValueError:
        raise ValueError(f"{schedule!r} is no schedule: give a number, 'linear_1e-3' or a function") from None
    return first * max(1 - done, _LEAST_LEFT) if schedule.startswith(_LINEAR) else first
