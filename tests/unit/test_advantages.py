"""Advantages, weights of tokens and DAPO's filters, on numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradserve.algorithms.rollouts.advantages import (
    OVERLONG,
    AdvantageKind,
    advantages,
    dynamic_sampling,
    overlong_filter,
    soft_overlong_penalty,
    token_weights,
)
from gradserve.episodes.episode import Episode
from tests.unit.rollouts import TIMEOUT, episode, failed, group, rewards


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        # rewards 1 0 0 1: the mean is 1/2, the variance with G - 1 is 4·(1/4)/3, the others' means are 1/3 and 2/3
        ("grpo", [0.5 / (math.sqrt(1 / 3) + 1e-4), -0.5 / (math.sqrt(1 / 3) + 1e-4)]),
        ("dr_grpo", [0.5, -0.5]),
        ("rloo", [2 / 3, -2 / 3]),
    ],
)
def test_advantages(kind: AdvantageKind, wanted: list[float]) -> None:
    high, low = wanted
    assert advantages([group(1.0, 0.0, 0.0, 1.0)], kind)[0] == pytest.approx([high, low, low, high])


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_a_failed_episode_enters_no_mean(kind: AdvantageKind) -> None:
    unscored = episode(None)
    found = advantages([[failed(), episode(1.0), unscored, episode(0.0)], [failed()], []], kind)
    alone = advantages([group(1.0, 0.0)], kind)[0]
    assert found == [[None, alone[0], None, alone[1]], [None], []]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_have_no_advantage(kind: AdvantageKind) -> None:
    """Not even one of rounding, which grpo would blow up: the mean of seven 0.1 is not 0.1."""
    assert advantages([group(*[0.1] * 7), group(3.0)], kind) == [[0.0] * 7, [0.0]]


def test_weights_of_tokens() -> None:
    groups = [[episode(1.0, 2), episode(0.0, 4)], [failed(), episode(1.0, 5)], [failed()]]
    assert token_weights(groups, "sequence") == [[1 / 8, 1 / 16], [0.0, 1 / 10], [0.0]]
    assert token_weights(groups, "constant", max_tokens=10) == [[1 / 40, 1 / 40], [0.0, 1 / 20], [0.0]]
    assert token_weights(groups, "token") == [[1 / 11, 1 / 11], [0.0, 1 / 11], [0.0]]
    assert token_weights([[failed()]], "token") == [[0.0]]


def test_an_episode_without_tokens_has_no_weight() -> None:
    silent = Episode({"prompt": "?"}, (), reward=0.0)
    assert token_weights([[silent, episode(1.0, 4)]], "sequence") == [[0.0, 1 / 4]]


def test_dynamic_sampling_leaves_groups_of_one_reward_out() -> None:
    mixed, right, wrong = group(1.0, 0.0), group(1.0, 1.0), group(0.0, 0.0)
    right_but_failed = [episode(1.0), failed(), episode(1.0)]
    assert dynamic_sampling([right, mixed, wrong, right_but_failed, [failed()]]) == [mixed]


def test_overlong_filter() -> None:
    cut = episode(0.0, stop_reason="length")
    before_any_reply = Episode({"prompt": "?"}, (), failure=TIMEOUT)
    kept = episode(1.0)
    assert overlong_filter([[cut, kept], [cut], [before_any_reply]]) == [[kept], [], [before_any_reply]]


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (130, -1.0)])
def test_soft_overlong_penalty(length: int, penalty: float) -> None:
    """DAPO's with a limit of 100 and a buffer of 20."""
    found = soft_overlong_penalty(episode(2.0, length), max_tokens=100, buffer=20)
    assert rewards([found]) == [2.0 + penalty]
    assert found.parts == {OVERLONG: penalty}


def test_a_penalty_makes_no_reward_of_a_failure() -> None:
    lost = episode(None, 99, failure=TIMEOUT)
    assert soft_overlong_penalty(lost, 100, 20) is lost


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: advantages([], "gpro"), "give one of grpo, dr_grpo, rloo"),  # type: ignore[arg-type]
        (lambda: token_weights([], "mean"), "give one of sequence, constant, token"),  # type: ignore[arg-type]
        (lambda: token_weights([], "constant"), "divides by max_tokens"),
        (lambda: soft_overlong_penalty(episode(1.0), 10, 20), "the buffer is 20 tokens"),
    ],
)
def test_refused(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
