"""Importance weights on numbers worked by hand: ratios 2, 5, 1 and, beside them, 1/4."""

from __future__ import annotations

import numpy as np
import pytest

from gradserve.algorithms.rollouts.corrections import CORRECTIONS, importance_weights, weight_metrics

TRAINER = np.log([0.9, 0.5, 0.5, 0.8])
SAMPLER = np.log([0.1, 0.25, 0.1, 0.8])
MASK = [0, 1, 1, 1]
CUBE_ROOT_OF_10 = 10 ** (1 / 3)


@pytest.mark.parametrize(
    ("kind", "cap", "wanted", "changed"),
    [
        ("none", 3.0, [1, 1, 1], [0, 0, 0]),
        ("truncated", 3.0, [2, 3, 1], [0, 1, 0]),
        ("masked", 3.0, [2, 0, 1], [0, 1, 0]),
        ("sequence", 3.0, [CUBE_ROOT_OF_10] * 3, [0, 0, 0]),
        ("sequence", 2.0, [2, 2, 2], [1, 1, 1]),
        ("sequence_truncated", 3.0, [3, 3, 3], [1, 1, 1]),
        ("sequence_truncated", 20.0, [10, 10, 10], [0, 0, 0]),
        ("sequence_masked", 3.0, [0, 0, 0], [1, 1, 1]),
        ("sequence_masked", 20.0, [10, 10, 10], [0, 0, 0]),
    ],
)
def test_weights(kind: str, cap: float, wanted: list[float], changed: list[int]) -> None:
    """The prompt's token, with a ratio of 9, has no part in any."""
    found = importance_weights(kind, TRAINER, SAMPLER, MASK, cap)
    assert found.weights.tolist() == pytest.approx([0, *wanted])
    assert found.changed.tolist() == [False, *map(bool, changed)]


def test_masked_bounds_both_sides() -> None:
    found = importance_weights("masked", np.log([0.1, 0.2]), np.log([0.4, 0.4]), [1, 1], cap=3.0)
    assert found.weights.tolist() == pytest.approx([0, 0.5])


def test_truncated_lets_small_ratios_be() -> None:
    found = importance_weights("truncated", np.log([0.1]), np.log([0.4]), [1], cap=3.0)
    assert found.weights.tolist() == pytest.approx([0.25])


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_equal_policies_have_weight_1(kind: str) -> None:
    found = importance_weights(kind, SAMPLER, SAMPLER, MASK)
    assert found.weights.tolist() == [0, 1, 1, 1]
    assert not found.changed.any()


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_no_weight_overflows(kind: str) -> None:
    found = importance_weights(kind, [0.0] * 400, [-90.0] * 400, [1] * 400, cap=1e9)
    assert np.isfinite(found.weights).all()


def test_metrics_are_of_sampled_tokens_alone() -> None:
    episodes = [
        importance_weights("truncated", TRAINER, SAMPLER, MASK, 3.0),
        importance_weights("truncated", [-1.0, -1.0], [-1.0, -1.0], [0, 0]),
    ]
    assert weight_metrics(episodes) == pytest.approx(
        {
            "importance/mean": 2.0,
            "importance/max": 3.0,
            "importance/truncated": 1 / 3,
            "importance/ess": 36 / (3 * 14),  # weights 2 3 1
        }
    )
    assert weight_metrics([]) == weight_metrics(episodes[1:]) == {}


@pytest.mark.parametrize(
    ("kind", "trainer", "cap", "said"),
    [
        ("tis", [0.0], 2.0, "give one of none, truncated"),
        ("truncated", [0.0], 0.5, "give at least 1"),
        ("truncated", [0.0], float("nan"), "give at least 1"),
        ("truncated", [0.0, 0.0], 2.0, r"shapes \(2,\) and \(1,\)"),
        ("none", [float("-inf")], 2.0, "not finite"),
    ],
)
def test_refused(kind: str, trainer: list[float], cap: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        importance_weights(kind, trainer, [0.0], [1], cap)
