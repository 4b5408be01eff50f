"""What a reward is, and what comes of calling one.

A reward is a function, sync or async, of any of the parameters ``prompt``, ``completion``, ``answer`` and ``state``, by
name, that returns a number or named numbers::

    def reward(completion, answer):
        return {"right": completion.strip() == answer, "brief": len(completion) < 200}  # 1.0 + 1.0

The invariant of this package: a call gives an :class:`Outcome` or a :class:`Failure`, and a failure never has a value.
A reward of 0 says that the completion is bad; a failure says that nothing is known about it.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Reward: TypeAlias = Callable[..., Any]
"""See the module's docstring; a function's parameters are read from its signature."""

FailureKind: TypeAlias = Literal["timeout", "crash", "invalid_value"]

PARAMETERS = ("prompt", "completion", "answer", "state")

TOTAL = "total"
"""The name, among named numbers, of the one that is trained on instead of their sum."""


class RewardUnusable(Exception):
    """The reward can't be called at all: it can't be found, loaded or named, or it wants other parameters."""


class InvalidValue(Exception):
    """A reward returned what is not a finite number, nor finite numbers by name."""


@dataclass(frozen=True)
class Sample:
    """What a reward is given; ``Sample("2 + 2 =", "4", answer="4")``.

    All of it is JSON (it crosses to another process): tuples arrive as lists and keys as strings. ``prompt`` is a text
    or a list of messages; ``answer`` and ``state`` are whatever the data has, None without.
    """

    prompt: Any
    completion: Any
    answer: Any = None
    state: Any = None


@dataclass(frozen=True)
class Outcome:
    """A reward; ``Outcome(2.0, {"right": 1.0, "brief": 1.0})``.

    ``parts`` are the named numbers without the total, {} when the reward returned a number. ``seconds`` is how long the
    call took, wall time.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Failure:
    """Why there is no reward; ``Failure("timeout", "no result within 5 s; it was in ...")``.

    ``timeout``: it did not end within its limit. ``crash``: it raised, or its process died. ``invalid_value``: it
    returned what is not a finite number. ``detail`` is for people: the traceback, the signal or the value.
    """

    kind: FailureKind
    detail: str


def accepted_parameters(reward: Reward) -> tuple[str, ...]:
    """Which of PARAMETERS the reward takes; ``**kwargs`` takes all. Raises RewardUnusable when it needs others."""
    if not callable(reward):
        raise RewardUnusable(f"a reward is a function, and {reward!r} can't be called")
    parameters = inspect.signature(reward).parameters.values()
    for parameter in parameters:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if needed and not (by_name and parameter.name in PARAMETERS):
            raise RewardUnusable(
                f"the reward needs {str(parameter)!r}, which is not given. A reward's parameters are any of "
                f"{', '.join(PARAMETERS)}, passed by name; others need a default."
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return PARAMETERS
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return tuple(name for name in PARAMETERS if name in names)


def arguments(sample: Sample, accepted: tuple[str, ...]) -> dict[str, Any]:
    """The keyword arguments of a call."""
    return {name: value for name, value in asdict(sample).items() if name in accepted}


def outcome_of(returned: object, seconds: float = 0.0) -> Outcome:
    """Check what a reward returned. Raises InvalidValue, whose text says what was wrong with which value."""
    if not isinstance(returned, Mapping):
        return Outcome(_number(returned, "the reward"), {}, seconds)
    if not returned:
        raise InvalidValue("the reward returned no named numbers: {}")
    for name in returned:
        if not isinstance(name, str) or not name.strip():
            raise InvalidValue(f"the reward named a part {name!r}; names are texts that are not empty")
    numbers_by_name = {name: _number(value, f"part {name!r}") for name, value in returned.items()}
    total = numbers_by_name.pop(TOTAL, None)
    value = sum(numbers_by_name.values()) if total is None else total
    return Outcome(_number(value, "the sum of the parts"), numbers_by_name, seconds)


def _number(value: object, what: str) -> float:
    """A finite float. True is 1.0 and False 0.0: what a comparison returns is meant as a number here."""
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = _only_element(value, what)  # of NumPy's bool, of a 0-d array or a tensor
    if not isinstance(value, numbers.Real):
        raise InvalidValue(f"{what} is {_shown(value)} of type {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidValue(f"{what} is {_shown(value)}, which is not finite")
    return number


def _only_element(value: Any, what: str) -> object:
    try:
        return value.item()
    except (ValueError, RuntimeError) as error:  # NumPy's and torch's for more than one element
        raise InvalidValue(f"{what} has more than one element: {_shown(value)}") from error


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more than sys.get_int_max_str_digits() digits
        text = "an integer of very many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
