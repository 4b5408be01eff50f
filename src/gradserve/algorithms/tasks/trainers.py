"""The trainers, by the names that task files use."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

TRAINERS = {
    "sft": "gradserve.algorithms.sft:SFTTrainer",
    "rl": "gradserve.algorithms.rl:RLTrainer",
    "dpo": "gradserve.algorithms.dpo:DPOTrainer",
    "reward": "gradserve.algorithms.reward_model:RewardModelTrainer",
    "distill": "gradserve.algorithms.distill:DistillTrainer",
    "ppo": "gradserve.algorithms.ppo:PPOTrainer",
}
"""Where each is. ``[task] trainer`` may also be such a place, ``module:Class``, of a class of one's own."""


class TaskError(ValueError):
    """A task file that can't be followed; the message names the table, the key and what to write."""


def trainer_class(name: str) -> type[Any]:
    """Of one of the names above, or of ``module:Class``. Raises TaskError."""
    place, _, attribute = TRAINERS.get(name, name).partition(":")
    if not attribute:
        raise TaskError(f"[task] trainer is {name!r}; {nearest(name, TRAINERS)}")
    try:
        found = getattr(importlib.import_module(place), attribute)
    except (ImportError, AttributeError) as error:
        raise TaskError(f"[task] trainer is {name!r}, and {place} can't be used: {error}") from error
    if not isinstance(found, type):
        raise TaskError(f"[task] trainer is {name!r}, which is no class")
    return found


def name_of(trainer: type[Any]) -> str:
    """The inverse."""
    place = f"{trainer.__module__}:{trainer.__qualname__}"
    return next((name for name, known in TRAINERS.items() if known == place), place)


def nearest(name: str, known: Iterable[str]) -> str:
    """What else could be meant, in words.

    >>> nearest("epoch", ["epochs", "batch_size"])
    "did you mean 'epochs'?"
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(known) or 'none: nothing goes here'}"
