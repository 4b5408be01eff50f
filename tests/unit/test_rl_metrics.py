"""Each number worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import ArrayLike

from gradserve.algorithms import critic
from gradserve.episodes.episode import Episode, Turn
from gradserve.rewards.contract import Failure
from gradserve.tracking import rl_metrics
from gradserve.tracking.names import NAMES, meaning


def played(reward: float | None, *lengths: int, version: int = 4, cut: bool = False, **more: object) -> Episode:
    """Each turn has 2 given tokens and ``lengths`` sampled ones of log-prob -0.5."""
    turns = [
        Turn((1, 2), (3,) * length, (-0.5,) * length, version + number, "length" if cut else "stop")
        for number, length in enumerate(lengths)
    ]
    return Episode({}, tuple(turns), reward=reward, **more)  # type: ignore[arg-type]


TIMEOUT = Failure("timeout", "5 s")


def test_rewards() -> None:
    groups = [
        [played(1.0, 1, parts={"right": 1.0, "brief": 0.5}), played(0.0, 1, parts={"right": 0.0})],
        [played(0.5, 1), played(0.5, 1), played(None, 1, failure=TIMEOUT)],
        [played(None, 1, failure=TIMEOUT)],
    ]
    assert rl_metrics.of_rewards(groups) == pytest.approx(
        {
            "reward/mean": 0.5,  # (1 + 0 + 0.5 + 0.5) / 4
            "reward/std": math.sqrt(0.125),  # (0.25 + 0.25) / 4
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/std_in_group": 0.25,  # (0.5 + 0) / 2
            "reward/zero_advantage_groups": 0.5,
            "reward/part/right": 0.5,
            "reward/part/brief": 0.5,
        }
    )


def test_episodes() -> None:
    crash = Failure("crash", "")
    episodes = [played(1.0, 3, 5), played(0.0, 2, cut=True), played(None, 2, failure=TIMEOUT)]
    assert rl_metrics.of_episodes([*episodes, played(None, failure=crash)]) == pytest.approx(
        {
            "episode/count": 4,
            "episode/failed": 0.5,
            "episode/failed/timeout": 1,
            "episode/failed/crash": 1,
            "episode/turns_mean": 4 / 3,
            "episode/tokens_mean": 4.0,  # (8 + 2 + 2) / 3
            "episode/tokens_max": 8,
            "episode/tokens": 20,  # 12 sampled and 4 turns with 2 given
            "episode/sampled_tokens": 12,
            "episode/truncated": 1 / 3,
        }
    )


def test_staleness_is_of_the_oldest_turn() -> None:
    episodes = [played(1.0, 1, 1, version=4), played(1.0, 1, version=6), played(None, failure=TIMEOUT)]
    expected = {"policy/staleness_mean": 2.0, "policy/staleness_max": 3}
    assert rl_metrics.of_staleness(episodes, 7) == pytest.approx(expected)


def test_entropy_is_per_token_not_per_episode() -> None:
    short = Episode({}, (Turn((), (1,), (-1.0,), 0),), reward=0.0)
    long = Episode({}, (Turn((), (1, 2, 3), (-0.1, -0.2, -0.3), 0),), reward=0.0)
    assert rl_metrics.of_entropy([short, long]) == pytest.approx({"policy/entropy": 0.4})


def test_kl_estimators_and_the_mask() -> None:
    """Differences log 2 and -log 2: k1 is 0, k3 the mean of 1/2 - 1 + log 2 and 2 - 1 - log 2."""
    policy: list[ArrayLike] = [np.array([9.0, math.log(0.5)]), [math.log(0.25)]]
    reference = [[0.0, math.log(0.25)], [math.log(0.5)]]
    found = rl_metrics.of_kl(policy, reference, mask=[[0, 1], [1]])
    assert found == pytest.approx({"policy/kl_k1": 0.0, "policy/kl_k3": 0.25})


def test_kl_estimators_are_unbiased() -> None:
    """Against KL(p || q) of a small vocabulary, from 200,000 tokens."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    tokens = np.random.default_rng(0).choice(3, size=200_000, p=p)
    truth = float((p * np.log(p / q)).sum())
    found = rl_metrics.of_kl(np.log(p)[tokens], np.log(q)[tokens])
    assert found == pytest.approx({"policy/kl_k1": truth, "policy/kl_k3": truth}, abs=5e-3)


def test_k3_of_nearly_equal_policies_keeps_its_digits() -> None:
    """d^2 / 2 for small d, far below the spacing of floats around 1."""
    assert rl_metrics.of_kl([1e-9], [0.0])["policy/kl_k3"] == pytest.approx(5e-19, rel=0.01, abs=0)


def test_ratios_and_clips() -> None:
    """101 ratios 0.50, 0.51 ... 1.50: percentiles fall on them."""
    ratios = np.linspace(0.5, 1.5, 101)
    signs = np.where(np.arange(101) % 3 == 0, 1.0, -1.0)
    config = {"clip_low_threshold": 0.795, "clip_high_threshold": 1.205}
    found = rl_metrics.of_ratios(np.log(ratios) - 3, np.full(101, -3.0), config, advantages=signs)
    assert found == pytest.approx(
        {
            "policy/ratio_p1": 0.51,
            "policy/ratio_p50": 1.0,
            "policy/ratio_p99": 1.49,
            "policy/ratio_max": 1.5,
            "policy/ratio_below_clip": 30 / 101,  # 0.50 to 0.79
            "policy/ratio_above_clip": 30 / 101,  # 1.21 to 1.50
            "policy/clip_fraction": 30 / 101,  # 20 of 0 to 29 with a minus, 10 of 71 to 100 with a plus
        }
    )
    assert "policy/clip_fraction" not in rl_metrics.of_ratios(ratios, ratios, config)
    assert "policy/ratio_below_clip" not in rl_metrics.of_ratios(ratios, ratios, {})


def test_mismatch() -> None:
    """Sampler less trainer: log 2 and 0."""
    found = rl_metrics.of_mismatch([math.log(0.25), -1.0], [math.log(0.5), -1.0])
    assert found == pytest.approx(
        {
            "policy/mismatch_mean": math.log(2) / 2,
            "policy/mismatch_max": math.log(2),
            "policy/mismatch_kl": (0.5 - 1 + math.log(2)) / 2,
        }
    )


def test_explained_variance() -> None:
    """Returns 0 and 2 have variance 1; of values 0 and 1, what is left is 0 and 1, with variance 1/4."""
    assert rl_metrics.of_values([0.0, 1.0], [0.0, 2.0]) == pytest.approx({"policy/explained_variance": 0.75})
    assert rl_metrics.of_values([0.0, 1.0], [3.0, 3.0]) == {}


def test_nothing_gives_no_metric() -> None:
    failed = played(None, failure=TIMEOUT)
    assert rl_metrics.of_groups([], version=0) == {}
    assert rl_metrics.of_groups([[failed]], version=0) == {
        "episode/count": 1,
        "episode/failed": 1.0,
        "episode/failed/timeout": 1,
    }
    assert rl_metrics.of_ratios([], []) == rl_metrics.of_kl([], []) == rl_metrics.of_mismatch([], []) == {}


def test_arrays_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 1\] tokens do not belong to \[1, 2\]"):
        rl_metrics.of_kl([[0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0]])
    with pytest.raises(ValueError, match="do not belong"):
        rl_metrics.of_kl([0.0, 0.0], [0.0, 0.0], mask=[1.0])


def test_every_metric_has_a_meaning() -> None:
    groups = [[played(1.0, 2, parts={"right": 1.0}), played(None, 2, failure=TIMEOUT)]]
    two = [-1.0, -2.0]
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    found = (
        rl_metrics.of_groups(groups, version=5)
        | rl_metrics.of_kl(two, two)
        | rl_metrics.of_ratios(two, two, config, advantages=two)
        | rl_metrics.of_mismatch(two, two)
        | rl_metrics.of_values(two, two)
        | critic.metrics_of({"loss": 0.0, "value_error": 1.0, "explained_variance": 0.0})
    )
    assert [name for name in found if meaning(name) is None] == []
    prefixes = ("reward/", "episode/", "policy/")
    told = {name for name in NAMES if name.startswith(prefixes) and not name.endswith("*")}
    assert told - set(found) == set()
    assert meaning("reward/part/right") == NAMES["reward/part/*"]
    assert meaning("nobody/knows") is None
