"""Episodes made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradserve.episodes.episode import Episode, StopReason, Turn
from gradserve.rewards.contract import Failure

TIMEOUT = Failure("timeout", "no result within 5 s")


def turn(length: int, version: int = 0, stop_reason: StopReason = "stop") -> Turn:
    return Turn((1, 2), tuple(range(10, 10 + length)), tuple(-0.5 for _ in range(length)), version, stop_reason)


def episode(
    reward: float | None,
    length: int = 3,
    *,
    version: int = 0,
    stop_reason: StopReason = "stop",
    row: Mapping[str, Any] | None = None,
    failure: Failure | None = None,
) -> Episode:
    return Episode(row or {"prompt": "?"}, (turn(length, version, stop_reason),), reward=reward, failure=failure)


def failed() -> Episode:
    """It has a reward too, of the attempt before its failure: that must not count."""
    return episode(100.0, 50, failure=TIMEOUT)


def group(*rewards: float) -> list[Episode]:
    return [episode(reward) for reward in rewards]


def rewards(episodes: Sequence[Episode]) -> list[float | None]:
    return [found.reward for found in episodes]
