"""What an episode is worth beside the others of its group, how much each of its tokens counts, and DAPO's filters.

Numbers are worked on groups of episodes. An episode with a ``failure`` or without a reward has no advantage (None): it
enters no mean, no deviation and no count.

  grpo     (r - mean) / (std + 1e-4)        Shao et al. 2024, arXiv:2402.03300, 4.1; std with G - 1, as in TRL
  dr_grpo  r - mean                         Liu et al. 2025, arXiv:2503.20783, section 3.2
  rloo     r - mean of the others' rewards  Ahmadian et al. 2024, arXiv:2402.14740
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np

from gradserve.episodes.episode import Episode

Group: TypeAlias = Sequence[Episode]
AdvantageKind: TypeAlias = Literal["grpo", "dr_grpo", "rloo"]
Normalisation: TypeAlias = Literal["sequence", "constant", "token"]
Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

STD_EPSILON = 1e-4
"""Keeps a group of nearly equal rewards finite."""

OVERLONG = "overlong"
"""The reward's part that soft_overlong_penalty adds."""


# Advantages


def advantages(groups: Sequence[Group], kind: AdvantageKind) -> list[list[float | None]]:
    """Of each episode of each group; None for those that are not trained on.

    ``advantages([[right, wrong]], "dr_grpo") == [[0.5, -0.5]]`` for rewards 1 and 0. A group with one scored episode
    has nothing to compare with: its advantage is 0. Raises ValueError for an unknown kind.
    """
    if kind not in _ADVANTAGES:
        raise ValueError(f"the advantage is {kind!r}: give one of {', '.join(_ADVANTAGES)}")
    return [_spread(group, _ADVANTAGES[kind](_rewards(group))) for group in groups]


def _grpo(rewards: Values) -> Values:
    deviation = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
    return _dr_grpo(rewards) / (deviation + STD_EPSILON)


def _dr_grpo(rewards: Values) -> Values:
    if np.all(rewards == rewards[:1]):
        return np.zeros_like(rewards)  # exactly: the mean of equal numbers may differ from them in its last bit
    deviations: Values = rewards - rewards.mean()
    return deviations


def _rloo(rewards: Values) -> Values:
    """Equal to r - (sum - r) / (G - 1)."""
    return _dr_grpo(rewards) * len(rewards) / max(len(rewards) - 1, 1)


_ADVANTAGES: Mapping[str, Callable[[Values], Values]] = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo}


def is_scored(episode: Episode) -> bool:
    """Whether it has a reward that may be trained on."""
    return episode.failure is None and episode.reward is not None


def _rewards(group: Group) -> Values:
    return np.array([episode.reward for episode in group if is_scored(episode)], np.float64)


def _spread(group: Group, values: Values) -> list[float | None]:
    """The scored episodes' values at their places, None at the others'."""
    scored = iter(values.tolist())
    return [next(scored) if is_scored(episode) else None for episode in group]


# How much a token counts


def token_weights(groups: Sequence[Group], kind: Normalisation, max_tokens: int | None = None) -> list[list[float]]:
    """The weight of each sampled token of each episode; losses are sums on the protocol, so this makes means of them.

    sequence  1 / (P·G·length): a mean over a sequence's tokens, then over a group, then over groups: GRPO,
              arXiv:2402.03300, eq. 3
    constant  1 / (P·G·max_tokens): a long answer's tokens count as much as a short one's: Dr. GRPO, arXiv:2503.20783
    token     1 / (all tokens of the batch): a mean over tokens: DAPO, arXiv:2503.14476, section 3.3

    P is the number of groups with a scored episode and G that of a group's scored episodes; the weight of others is 0.
    ``max_tokens``, for constant alone: the most that an episode may sample. Raises ValueError.
    """
    if kind not in _NORMALISATIONS:
        raise ValueError(f"the normalisation is {kind!r}: give one of {', '.join(_NORMALISATIONS)}")
    if kind == "constant" and (max_tokens is None or max_tokens < 1):
        raise ValueError("the normalisation 'constant' divides by max_tokens: give a number from 1")
    counted = [[episode for episode in group if _is_counted(episode)] for group in groups]
    prompts = sum(bool(group) for group in counted)
    tokens = sum(episode.sampled for group in counted for episode in group)

    def weight(episode: Episode, size: int) -> float:
        if kind == "token":
            return 1 / tokens
        length = episode.sampled if kind == "sequence" else max_tokens
        assert length is not None
        return 1 / (prompts * size * length)

    return [
        [weight(episode, len(scored)) if _is_counted(episode) else 0.0 for episode in group]
        for group, scored in zip(groups, counted, strict=True)
    ]


_NORMALISATIONS = ("sequence", "constant", "token")


def _is_counted(episode: Episode) -> bool:
    return is_scored(episode) and episode.sampled > 0


# DAPO, arXiv:2503.14476


def is_informative(group: Group) -> bool:
    """Whether its scored episodes' rewards differ; without that all advantages are 0."""
    return len({episode.reward for episode in group if is_scored(episode)}) > 1


def dynamic_sampling(groups: Sequence[Group]) -> list[Group]:
    """The informative groups alone (section 3.2); the caller samples other rows until its batch is full."""
    return [group for group in groups if is_informative(group)]


def overlong_filter(groups: Sequence[Group]) -> list[list[Episode]]:
    """Without the episodes that were cut at the token limit (section 3.4): nobody knows what they would have earned."""
    return [[episode for episode in group if not (episode.turns and episode.truncated)] for group in groups]


def soft_overlong_penalty(episode: Episode, max_tokens: int, buffer: int) -> Episode:
    """The episode with a penalty on its length as another part of its reward (eq. 13); as it was without a reward.

    0 up to ``max_tokens - buffer`` sampled tokens, then falling in a straight line to -1 at ``max_tokens``, -1 beyond.
    Raises ValueError unless 0 < buffer <= max_tokens.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"the buffer is {buffer} tokens: it lies in the last part of max_tokens, {max_tokens}")
    if not is_scored(episode):
        return episode
    assert episode.reward is not None
    beyond = episode.sampled - (max_tokens - buffer)
    penalty = -min(max(beyond / buffer, 0.0), 1.0)
    return replace(episode, reward=episode.reward + penalty, parts={**episode.parts, OVERLONG: penalty})
