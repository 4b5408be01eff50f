"""Generalised advantage estimation against numbers worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve.compute.engine.control.gae import advantages


def column(*values: float) -> NDArray[Any]:
    return np.array(values)[:, None]


def test_three_steps_by_hand() -> None:
    # gamma 0.5, lambda 0.5; deltas: 1 + .5*4 - 2 = 1, 2 + .5*6 - 4 = 1, 3 + .5*8 - 6 = 1
    found = advantages(column(1, 2, 3), column(2, 4, 6), column(4, 6, 8), column(0, 0, 0) > 0, 0.5, 0.5)
    assert found[:, 0].tolist() == [1 + 0.25 * (1 + 0.25), 1.25, 1.0]


def test_an_end_stops_the_sum_and_the_next_value_says_which_end() -> None:
    rewards, values, ended = column(1, 1, 1), column(2, 2, 2), column(0, 1, 0) > 0
    terminal = advantages(rewards, values, column(2, 0, 2), ended, 0.5, 0.5)
    cut = advantages(rewards, values, column(2, 2, 2), ended, 0.5, 0.5)
    # deltas: 0 inside; at the end 1 + 0 - 2 = -1 if it is terminal, 1 + 1 - 2 = 0 if it is a cut
    assert terminal[:, 0].tolist() == [-0.25, -1.0, 0.0]
    assert cut[:, 0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
def test_its_two_limits(gae_lambda: float) -> None:
    """lambda 0 is the temporal difference, lambda 1 the discounted return minus the value."""
    rewards, values = column(1, 2, 4), column(1, 1, 1)
    found = advantages(rewards, values, column(1, 1, 10), column(0, 0, 0) > 0, 0.5, gae_lambda)[:, 0]
    expected = [0.5, 1.5, 8.0] if gae_lambda == 0 else [1 + 1 + 1 + 10 / 8 - 1, 2 + 2 + 10 / 4 - 1, 4 + 5 - 1]
    assert found.tolist() == expected


def test_columns_do_not_mix() -> None:
    generator = np.random.default_rng(0)
    rewards, values, following = generator.normal(size=(3, 7, 4))
    ended = generator.random((7, 4)) < 0.3
    together = advantages(rewards, values, following, ended, 0.97, 0.9)
    for i in range(4):
        part = slice(i, i + 1)
        alone = advantages(rewards[:, part], values[:, part], following[:, part], ended[:, part], 0.97, 0.9)
        assert np.array_equal(together[:, part], alone)
