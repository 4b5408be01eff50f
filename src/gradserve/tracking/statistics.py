"""Means with confidence intervals, right for small counts too; no SciPy."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval; ``Estimate(0.7, 0.397, 0.892, 10)`` is 7 right of 10.

    ``count`` is the number of independent values: of problems, when each has several samples. ``low`` and ``high`` are
    infinite where one value alone says nothing about the spread.
    """

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}] of {self.count}"

    def metrics(self, name: str) -> dict[str, float]:
        """``Estimate(...).metrics("eval/reward")``: the mean under the name itself, ``_low``, ``_high``, ``_count``."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high, f"{name}_count": self.count}


def estimate(values: Sequence[float], *, problems: Sequence[Hashable] | None = None, level: float = 0.95) -> Estimate:
    """The mean of ``values`` [N] with an interval that covers the truth in ``level`` of all repetitions.

    Values that are all 0 or 1 have a Wilson interval, others Student's t. ``problems`` [N] says which problem each is a
    sample of; then the mean is the mean of the problems' means, and only problems count as independent. Raises
    ValueError for no values, values that are not finite, or lengths that differ.

    >>> str(estimate([1, 1, 1, 0, 1, 1, 0, 1, 0, 1]))
    '0.7 [0.397, 0.892] of 10'
    """
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("no values have no mean")
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a mean is of finite values; leave the others out and count them")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it is a probability, such as 0.95")
    means = numbers if problems is None else _problem_means(numbers, problems)
    if not all(value in (0.0, 1.0) for value in numbers):
        return student_t_interval(means, level)
    if len(means) == len(numbers):
        return wilson_interval(fmean(numbers), len(numbers), len(numbers), level)
    return _clustered_proportion(means, len(numbers), level)


def student_t_interval(values: Sequence[float], level: float = 0.95) -> Estimate:
    """mean +- t s / sqrt(n), t with n - 1 degrees of freedom (Student 1908, "The probable error of a mean")."""
    mean, count = fmean(values), len(values)
    if count == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    half = student_t_quantile((1 + level) / 2, count - 1) * math.sqrt(variance(values) / count)
    return Estimate(mean, mean - half, mean + half, count)


def wilson_interval(proportion: float, trials: float, count: int, level: float = 0.95) -> Estimate:
    """The score interval (Wilson 1927, "Probable inference", JASA 22): never empty, never outside of 0 to 1.

    ``trials`` may be an effective number, which need not be whole; ``count`` is what the Estimate reports.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    shrunk = 1 + z * z / trials
    centre = (proportion + z * z / (2 * trials)) / shrunk
    half = z / shrunk * math.sqrt(proportion * (1 - proportion) / trials + z * z / (4 * trials * trials))
    return Estimate(proportion, max(0.0, centre - half), min(1.0, centre + half), count)


def student_t_quantile(probability: float, degrees: int) -> float:
    """x with P(T <= x) = ``probability``, for a whole number of ``degrees`` of freedom, at least 1.

    To 1e-9 of its size: by bisection of the exact finite series, and past 200 degrees by the expansion around the
    normal quantile (Abramowitz and Stegun, 26.7.3, 26.7.4 and 26.7.5).
    """
    if probability == 0.5:
        return 0.0
    if probability < 0.5:
        return -student_t_quantile(1 - probability, degrees)
    if degrees > 200:
        return _expanded_quantile(NormalDist().inv_cdf(probability), degrees)
    central, low, high = 2 * probability - 1, 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, degrees) < central else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _central_probability(angle: float, degrees: int) -> float:
    """P(|T| <= t) with t = sqrt(degrees) tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _expanded_quantile(x: float, degrees: int) -> float:
    terms: tuple[float, ...] = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))


def _problem_means(values: Sequence[float], problems: Sequence[Hashable]) -> list[float]:
    samples: dict[Hashable, list[float]] = defaultdict(list)
    for value, problem in zip(values, problems, strict=True):
        samples[problem].append(value)
    return [fmean(of_problem) for of_problem in samples.values()]


def _clustered_proportion(means: Sequence[float], samples: int, level: float) -> Estimate:
    """Wilson's interval with the effective number of trials that the spread between problems leaves.

    n_eff = p (1 - p) / (s^2 / m) for m problems, times (z / t)^2 for the few degrees of freedom of s (Korn and Graubard
    1998, Survey Methodology 24; with Wilson: Franco et al. 2019, J. Survey Statistics and Methodology 7). It is at most
    the number of samples, and at p = 0 or 1, where no spread is seen, the number of problems.
    """
    mean, count = fmean(means), len(means)
    if count == 1:
        return Estimate(mean, 0.0, 1.0, 1)
    spread = mean * (1 - mean)
    if spread <= 0:
        return wilson_interval(mean, count, count, level)
    error = variance(means) / count
    trials = min(samples, spread / error) if error else samples
    upper = (1 + level) / 2
    few = NormalDist().inv_cdf(upper) / student_t_quantile(upper, count - 1)
    return wilson_interval(mean, trials * few * few, count, level)
