"""How a reward is named, so that another process can find it without unpickling anything.

A name is ``file.py:function`` or ``module:function``. A reward with settings is made by a :func:`factory`, whose
arguments go along as JSON. What has no name (a lambda, a function inside a function) is refused: it could run only in
this process, where nothing can stop it once it hangs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

from gradserve.rewards.contract import Reward, RewardUnusable

P = ParamSpec("P")

_ATTRIBUTE = "__gradserve_reward__"


@dataclass(frozen=True)
class Reference:
    """``Reference("rewards.py:near", {"tolerance": 0.1})``: near(tolerance=0.1) is the reward; None: near itself is."""

    target: str
    arguments: dict[str, Any] | None = None


def factory(make: Callable[P, Reward]) -> Callable[P, Reward]:
    """Decorates a top-level function that returns a reward, so that the reward can run in another process::

        @factory
        def near(tolerance):
            def reward(completion, answer):
                return abs(float(completion) - answer) <= tolerance
            return reward

    The arguments must be JSON. Raises RewardUnusable from the call when they are not.
    """

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Reward:
        bound = inspect.signature(make).bind(*args, **kwargs).arguments
        reward = make(*args, **kwargs)
        setattr(reward, _ATTRIBUTE, Reference(_target_of(made), _checked(bound, made)))
        return reward

    return made


def reference_to(reward: Reward | str) -> Reference:
    """The name of a reward. Raises RewardUnusable when it has none that another process could find."""
    if isinstance(reward, str):
        split_target(reward)
        return Reference(reward)
    made_by = getattr(reward, _ATTRIBUTE, None)
    return made_by if isinstance(made_by, Reference) else Reference(_target_of(reward))


def resolve(reference: Reference) -> Reward:
    """Import what the reference names. Raises RewardUnusable when it is not there; an import's own errors pass."""
    place, name = split_target(reference.target)
    module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise RewardUnusable(f"there is no {name} in {place}")
        found = getattr(found, part)
    reward: Reward = found if reference.arguments is None else found(**reference.arguments)
    return reward


def split_target(target: str) -> tuple[str, str]:
    """``file.py:function`` or ``module:function`` in two. Raises RewardUnusable."""
    place, _, name = target.rpartition(":")
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise RewardUnusable(f"{target!r} names no reward; write file.py:function or module:function")
    return place, name


def _target_of(reward: Reward) -> str:
    name, module = getattr(reward, "__qualname__", ""), sys.modules.get(getattr(reward, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not reward:
        raise RewardUnusable(
            f"{reward!r} can't be found by name from another process, where it could be stopped when it hangs. Put it "
            "at the top level of a file as a def; a reward with settings is made by a @gradserve.rewards.factory; or "
            "name it: 'file.py:function'."
        )
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    if (file := getattr(module, "__file__", None)) is None:
        raise RewardUnusable(f"{name} was written at a prompt or in a notebook: put it in a file, 'file.py:{name}'")
    return f"{Path(file).resolve()}:{name}"


def _checked(bound: dict[str, Any], made: Callable[..., Reward]) -> dict[str, Any]:
    try:
        json.dumps(bound)
    except (TypeError, ValueError) as error:
        raise RewardUnusable(
            f"the arguments of {made.__qualname__} must be JSON, to cross to a process: {error}"
        ) from error
    return bound


def _load_file(path: Path) -> Any:
    """The module of a file, with its folder importable, as when Python is given the file to run."""
    if not path.is_file():
        raise RewardUnusable(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"gradserve_reward_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
