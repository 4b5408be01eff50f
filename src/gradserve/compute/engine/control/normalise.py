"""Running moments of observations and of discounted returns, as VecNormalize of Stable-Baselines3 keeps them.

Observations: the moments are buffers of the weights, frozen while a trajectory is collected, moved on by the update, so
that a saved policy acts in evaluation as it did in training. Rewards: divided by the deviation of a running
discounted return (details 6 and 7 of the continuous part of Huang et al. 2022); that state is the environments'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradserve.compute.engine.control.spaces import Floats

Doubles = NDArray[np.float64]

OBSERVATIONS = "normalise.obs."
"""What the names of the weights' buffers start with."""
_EPSILON = 1e-8
"""Added to a variance before its root, as in VecNormalize."""


@dataclass(frozen=True)
class Moments:
    """Mean and (population) variance, any shape, of ``count`` values seen so far. Before the first: 0, 1 and 0."""

    mean: Doubles
    var: Doubles
    count: float

    @classmethod
    def of(cls, rows: NDArray[Any]) -> Moments:
        """Those of ``rows`` [n, ...]."""
        if not len(rows):
            return cls.none(rows.shape[1:])
        wide = rows.astype(np.float64)
        return cls(wide.mean(axis=0), wide.var(axis=0), float(len(rows)))

    @classmethod
    def none(cls, shape: tuple[int, ...], count: float = 0.0) -> Moments:
        """Those of nothing, or of a prior that weighs ``count``."""
        return cls(np.zeros(shape), np.ones(shape), count)

    def merged(self, other: Moments) -> Moments:
        """Those of both sets together (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        if not count:
            return self
        delta = other.mean - self.mean
        squares = self.var * self.count + other.var * other.count + delta**2 * (self.count * other.count / count)
        return Moments(self.mean + delta * (other.count / count), squares / count, count)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """``<prefix>mean``, ``<prefix>var`` and the scalar ``<prefix>count``, float64."""
        return {
            prefix + "mean": torch.from_numpy(np.array(self.mean)),
            prefix + "var": torch.from_numpy(np.array(self.var)),
            prefix + "count": torch.tensor(self.count, dtype=torch.float64),
        }

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], prefix: str, shape: tuple[int, ...], count: float = 0.0) -> Moments:
        """What ``tensors`` wrote; those of nothing (or of the prior ``count``) where there is none."""
        if prefix + "mean" not in tensors:
            return cls.none(shape, count)
        mean, var, seen = (tensors[prefix + name].numpy().astype(np.float64) for name in ("mean", "var", "count"))
        return cls(mean, var, float(seen))


class ObservationNormaliser:
    """(x - mean) / sqrt(var + 1e-8), clipped; as it is while nothing was seen."""

    def __init__(self, moments: Moments, clip: float) -> None:
        self._mean = moments.mean.astype(np.float32)
        self._scale = (1 / np.sqrt(moments.var + _EPSILON)).astype(np.float32)
        self._clip = np.float32(clip)

    def __call__(self, observations: Floats) -> Floats:
        """[n, features] -> the same shape, a new array."""
        scaled = (observations - self._mean) * self._scale
        return np.clip(scaled, -self._clip, self._clip, out=scaled)


_PRIOR = 1e-4
"""The weight of the first variance, 1: VecNormalize's own, so that the first rewards are divided by a finite number."""


class RewardNormaliser:
    """r / sqrt(var(G) + 1e-8), clipped, where G_t = gamma G_(t-1) + r_t restarts with each episode.

    The variance is over all G of the group so far, those of this very step among them.
    """

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, n: int, gamma: float, clip: float) -> None:
        self._prefix, self._gamma, self._clip = prefix, gamma, clip
        self._moments = Moments.read(tensors, prefix, (), _PRIOR)
        discounted = tensors.get(prefix + "discounted")
        self._discounted = np.zeros(n) if discounted is None else discounted.numpy().copy()

    def __call__(self, rewards: Doubles, ended: NDArray[np.bool_], valid: NDArray[np.bool_]) -> Doubles:
        """The normalised rewards [n] of one step; ``ended`` [n] restarts, not ``valid`` [n] is no reward at all."""
        self._discounted[valid] = self._discounted[valid] * self._gamma + rewards[valid]
        if valid.any():
            self._moments = self._moments.merged(Moments.of(self._discounted[valid]))
        self._discounted[ended] = 0
        return np.clip(rewards / np.sqrt(self._moments.var + _EPSILON), -self._clip, self._clip)

    def restart(self, which: NDArray[np.bool_]) -> None:
        """New episodes there."""
        self._discounted[which] = 0

    def tensors(self) -> dict[str, Tensor]:
        """Its whole state."""
        discounted = torch.from_numpy(self._discounted.copy())
        return self._moments.tensors(self._prefix) | {self._prefix + "discounted": discounted}
