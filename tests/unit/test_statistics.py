"""Intervals against SciPy's, and against the coverage that they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradserve.tracking import Estimate, estimate
from gradserve.tracking.statistics import student_t_quantile

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 10, 29, 199, 200, 201, 5000])
def test_student_t_quantile(degrees: int) -> None:
    for probability in (0.01, 0.3, 0.5, 0.9, 0.975, 0.9995):
        expected = stats.t.ppf(probability, degrees)
        assert student_t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("right", "count"), [(7, 10), (0, 5), (5, 5), (1, 1), (300, 1000)])
def test_zeros_and_ones_have_a_wilson_interval(right: int, count: int) -> None:
    found = estimate([1.0] * right + [0.0] * (count - right))
    expected = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert (found.mean, found.count) == (right / count, count)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_other_values_have_students_interval(level: float) -> None:
    values = [0.5, 2.0, -1.0, 4.0]
    expected = stats.t.interval(level, 3, loc=np.mean(values), scale=stats.sem(values))
    found = estimate(values, level=level)
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-9)


def test_one_value_says_nothing_about_the_spread() -> None:
    assert estimate([0.5]) == Estimate(0.5, -math.inf, math.inf, 1)


def test_samples_of_a_problem_count_as_one() -> None:
    """Problem a: 0.5 and 1.5; b: 3. The means are 1 and 3, of two problems."""
    found = estimate([0.5, 3.0, 1.5], problems=["a", "b", "a"])
    half = stats.t.ppf(0.975, 1) * math.sqrt(2) / math.sqrt(2)
    assert (found.mean, found.count) == (2.0, 2)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), rel=1e-9)


def test_samples_that_always_agree_are_worth_one_each() -> None:
    """Then n_eff = (m - 1) p (1 - p) / (p (1 - p)) = 19 of 20 problems, times (z / t)^2."""
    found = estimate([1.0] * 40 + [0.0] * 40, problems=[index // 4 for index in range(80)])
    trials = 19 * (stats.norm.ppf(0.975) / stats.t.ppf(0.975, 19)) ** 2
    z = stats.norm.ppf(0.975)
    half = z / (1 + z * z / trials) * math.sqrt(0.25 / trials + z * z / (4 * trials * trials))
    assert (found.mean, found.count) == (0.5, 20)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-9)


def test_all_right_is_not_certainty() -> None:
    found = estimate([1.0] * 32, problems=[index // 8 for index in range(32)])
    assert (found.low, found.high) == pytest.approx(tuple(stats.binomtest(4, 4).proportion_ci(method="wilson")))
    assert estimate([1.0, 1.0], problems=["a", "a"]) == Estimate(1.0, 0.0, 1.0, 1)


@pytest.mark.parametrize("samples", [1, 6])
def test_the_interval_covers_the_truth_as_often_as_it_says(samples: int) -> None:
    """25 problems whose difficulty is uniform: the true mean is 1/2. 400 repetitions have a standard error of 1.1%."""
    random = np.random.default_rng(0)
    problems = np.repeat(np.arange(25), samples).tolist()
    covered = 0
    for _ in range(400):
        difficulty = np.repeat(random.uniform(size=25), samples)
        found = estimate((random.uniform(size=25 * samples) < difficulty).astype(float).tolist(), problems=problems)
        covered += found.low <= 0.5 <= found.high
    assert 0.92 <= covered / 400 <= 0.985


@pytest.mark.parametrize(
    ("values", "problems", "level", "words"),
    [
        ([], None, 0.95, "no values"),
        ([1.0, math.nan], None, 0.95, "finite"),
        ([1.0], None, 95, "probability"),
        ([1.0, 0.0], ["a"], 0.95, "shorter"),
    ],
)
def test_what_has_no_interval_is_refused(
    values: list[float], problems: list[str] | None, level: float, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        estimate(values, problems=problems, level=level)


def test_an_estimate_as_words_and_as_metrics() -> None:
    found = Estimate(0.7, 0.397, 0.892, 10)
    assert str(found) == "0.7 [0.397, 0.892] of 10"
    assert found.metrics("eval/reward") == {
        "eval/reward": 0.7,
        "eval/reward_low": 0.397,
        "eval/reward_high": 0.892,
        "eval/reward_count": 10,
    }
