"""Random numbers that depend on nothing but (seed, sample, position): the same whatever a sample is batched with.

A counter-based stream: the counters are hashed by the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators", OOPSLA).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def streams(seeds: Sequence[int], samples: Sequence[int]) -> U64:
    """The key of the stream of each (seed, sample). Seeds may be any integers (mod 2**64)."""
    return _mix(_mix(_u64(seeds) + _GAMMA) + _GAMMA * (_u64(samples) + np.uint64(1)))


def uniform(keys: U64, positions: Sequence[int] | U64) -> NDArray[np.float64]:
    """One number in [0, 1) of 53 bits for each position of the stream beside it (shapes are broadcast)."""
    state = _mix(keys + _GAMMA * (np.array(positions, dtype=np.uint64) + np.uint64(1)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _u64(values: Sequence[int]) -> U64:
    return np.array([value & _MASK for value in values], dtype=np.uint64)


def _mix(z: U64) -> U64:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
