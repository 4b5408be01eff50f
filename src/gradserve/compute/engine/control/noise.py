"""Every random number of a control run, a function of a seed and counters, so that no generator has a state.

The streams of ``engine.rng``, told apart by a purpose: an action never shares its noise with a minibatch's order.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from gradserve.compute.engine.rng import streams, uniform


class Purpose(IntEnum):
    """What a number is drawn for."""

    EPISODE = 1
    ACTION = 2
    MINIBATCH = 3


def episode_seed(seed: int, stream: int, episode: int) -> int:
    """The seed that Gymnasium's reset gets for one episode: 53 bits."""
    return int(uniform(_keys(seed, Purpose.EPISODE, [stream]), [episode])[0] * 2.0**53)


def action_noise(seed: int, members: range, first_step: int, steps: int, draws: int) -> NDArray[np.float64]:
    """Uniform numbers [steps, len(members), draws] in [0, 1): those of an environment depend on no other one."""
    keys = _keys(seed, Purpose.ACTION, members)[None, :, None]
    positions = np.arange(first_step * draws, (first_step + steps) * draws, dtype=np.uint64)
    return uniform(keys, positions.reshape(steps, 1, draws))


def permutation(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """An order of ``length`` things. Sorted draws, since numpy's own permutations may change with its version."""
    return np.argsort(
        uniform(_keys(seed, Purpose.MINIBATCH, [epoch]), np.arange(length, dtype=np.uint64)), kind="stable"
    )


def _keys(seed: int, purpose: Purpose, counters: range | list[int]) -> NDArray[np.uint64]:
    root = int(streams([seed], [purpose])[0])
    return streams([root] * len(counters), counters)
