"""What a policy talks to: the contract for environments, and how one is named in a configuration.

An environment is a class; each episode gets a fresh instance, so its attributes are the episode's state::

    class Guess:
        def start(self, row):
            self.secret = row["number"]
            return [{"role": "user", "content": "Guess my number, 1 to 10."}]

        def reply(self, message):
            if message["content"].strip() == str(self.secret):
                return Step(done=True, reward=1.0)
            return Step([{"role": "user", "content": "No. Again."}], reward=0.0)

``start`` and ``reply`` may be async. ``tools``, a class or instance attribute, is a sequence of functions that the
model may call (see tools.py). The environment is given the last reply of every episode, also when the limit of turns
or tokens ends it, so it can always say what was earned.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gradserve.episodes.episode import Message
from gradserve.episodes.errors import EnvironmentUnusable, RowUnusable
from gradserve.rewards.contract import RewardUnusable
from gradserve.rewards.naming import Reference, resolve


@dataclass(frozen=True)
class Step:
    """What follows a reply: ``Step([{"role": "user", "content": "No. Again."}])`` or ``Step(done=True, reward=1.0)``.

    ``reward`` is what a reward function may return (a number, or named numbers); those of all steps are added up. None
    says nothing about the reply: when no step has a reward, the episode is left to the reward function.
    """

    messages: Sequence[Message] = ()
    done: bool = False
    reward: float | Mapping[str, float] | None = None


@runtime_checkable
class Environment(Protocol):
    """See the module's docstring. Both methods may be async; ``tools`` is optional."""

    def start(self, row: Mapping[str, Any]) -> Any:
        """The messages that the first reply answers."""

    def reply(self, message: Message) -> Any:
        """The Step that follows the policy's message."""


class SingleTurn:
    """The default: the row's ``prompt`` (a text or messages) gets one reply, which a reward function scores."""

    def start(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Raises RowUnusable."""
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and prompt:
            return prompt
        raise RowUnusable(
            f"the row has the columns {', '.join(row) or 'none'}; an episode begins with prompt, a text or a list of "
            "messages: rename the column, or give an environment"
        )

    def reply(self, message: Message) -> Step:
        return Step(done=True)


@dataclass(frozen=True)
class EnvironmentConfig:
    """How episodes are played. ``make`` makes the instance of one episode.

    ``max_turns`` counts replies. ``max_context_tokens`` bounds prompts and replies together; None: the server does.
    ``timeout_s`` is the wall time that one call of the environment or of a tool may take.
    """

    make: Callable[[], Environment] = SingleTurn
    max_turns: int = 1
    max_context_tokens: int | None = None
    timeout_s: float = 30.0


_KEYS = ("environment", "arguments", "max_turns", "max_context_tokens", "timeout_s")

_MAX_TURNS = 8


def environment_of(env_config: Mapping[str, Any] | None = None) -> EnvironmentConfig:
    """From ``{"environment": "game.py:Guess", "max_turns": 4}``; without an environment episodes are single-turn.

    environment: ``file.py:Class``, ``module:Class``, or the class (or a function that makes an instance). arguments:
    a dict, for the class. The others: see EnvironmentConfig; max_turns is 8 by default. Raises EnvironmentUnusable.
    """
    given = dict(env_config or {})
    _refuse_unknown(given)
    named = given.pop("environment", None)
    arguments = given.pop("arguments", {})
    if named is None and (arguments or given.get("max_turns", 1) != 1):
        raise EnvironmentUnusable(
            "arguments and max_turns are an environment's; without one an episode is one reply: "
            "add environment='file.py:Class'"
        )
    _check_limits(given)
    if named is None:
        return EnvironmentConfig(**given)
    make = _loaded(named) if isinstance(named, str) else named
    _refuse_incomplete(make)

    @functools.wraps(make, updated=())  # errors of the class are said under its name
    def made() -> Environment:
        return _made(make, arguments)

    return EnvironmentConfig(made, **{"max_turns": _MAX_TURNS, **given})


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for key in given:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1)
            meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KEYS)}"
            raise EnvironmentUnusable(f"env_config has no key {key!r}; {meant}")


def _check_limits(given: Mapping[str, Any]) -> None:
    for name in ("max_turns", "max_context_tokens"):
        value = given.get(name, 1)
        if name in given and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise EnvironmentUnusable(f"{name} is a whole number of at least 1, not {value!r}")
    timeout_s = given.get("timeout_s", 1)
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not timeout_s > 0:
        raise EnvironmentUnusable(f"timeout_s is a number of seconds above 0, not {timeout_s!r}")


def _loaded(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise EnvironmentUnusable(f"{target!r} names no environment; write file.py:Class or module:Class")
    try:
        return resolve(Reference(target))
    except (RewardUnusable, ImportError) as error:
        raise EnvironmentUnusable(f"the environment {target} can't be loaded: {error}") from error


def _refuse_incomplete(make: Any) -> None:
    if isinstance(make, type):
        missing = [name for name in ("start", "reply") if not callable(getattr(make, name, None))]
        if missing:
            raise EnvironmentUnusable(
                f"{make.__name__} lacks {' and '.join(missing)}; an environment has start and reply"
            )
    elif not callable(make):
        raise EnvironmentUnusable(f"an environment is a class or a function that makes one, not {make!r}")


def _made(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Environment:
    made = make(**arguments)
    if not isinstance(made, Environment):
        raise EnvironmentUnusable(f"{make!r} made a {type(made).__name__}, which lacks start or reply")
    return made
