"""Importance weights: how much more likely the trainer's weights make what the sampler sampled.

What was sampled by q (other weights, or the same ones computed by another engine) is trained on under p; a token's
gradient is weighed by a ratio of the two, held constant. With r_t = p(a_t) / q(a_t) over an episode's sampled tokens:

  none                1
  truncated           min(r_t, cap)                     token by token: Espeholt et al. 2018, arXiv:1802.01561 (the
                      truncated rho of V-trace); for samplers of language models Yao et al. 2025, "Your efficient RL
                      framework secretly brings you off-policy RL training" (TIS)
  masked              r_t if 1/cap <= r_t <= cap else 0  token by token: Ling Team 2025, arXiv:2510.18855 (IcePop; its
                      two bounds are one here)
  sequence            min(exp(mean log r_t), cap)       one for the episode, of the ratio normalised by length: Zheng et
                      al. 2025, arXiv:2507.18071 (GSPO)
  sequence_truncated  min(prod r_t, cap)                one for the episode, unbiased but for the cap: Liu et al. 2025,
                      "When speed kills stability: demystifying RL collapse from the training-inference mismatch"
  sequence_masked     prod r_t if it is <= cap else 0   one for the episode, same source (sequence-level MIS)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

_MOST = 30.0
"""Of a logarithm, so that no weight is infinite: e^30 = 1e13. A cap is far below."""


@dataclass(frozen=True)
class Weighed:
    """``weights`` [N], 0 where the mask is; ``changed`` [N] says at which sampled tokens the cap or the bound acted."""

    weights: Array
    changed: Flags
    mask: Flags


def importance_weights(kind: str, trainer: ArrayLike, sampler: ArrayLike, mask: ArrayLike, cap: float = 2.0) -> Weighed:
    """Of one episode: log-probs [N] under the trainer's weights and under the sampler's, mask [N] of sampled tokens.

    ``importance_weights("truncated", [-1.0], [-2.0], [1]).weights == [2.0]``: the ratio e is cut at the cap. Raises
    ValueError for an unknown kind, a cap below 1, shapes that differ, or log-probs that are not finite.
    """
    if kind not in CORRECTIONS:
        raise ValueError(f"the importance correction is {kind!r}: give one of {', '.join(CORRECTIONS)}")
    if not cap >= 1.0:
        raise ValueError(f"the cap of importance weights is {cap}: give at least 1, where sampler and trainer agree")
    p, q, sampled = np.asarray(trainer, np.float64), np.asarray(sampler, np.float64), np.asarray(mask) != 0
    if not (p.ndim == 1 and p.shape == q.shape == sampled.shape):
        raise ValueError(f"log-probs of shapes {p.shape} and {q.shape} with a mask of {sampled.shape}: all are [N]")
    log_ratio = (p - q)[sampled]
    if not np.isfinite(log_ratio).all():
        raise ValueError("a sampled token has a log-prob that is not finite")
    weights, changed = np.zeros(p.shape), np.zeros(p.shape, np.bool_)
    if log_ratio.size:
        weights[sampled], changed[sampled] = CORRECTIONS[kind](log_ratio, cap)
    return Weighed(weights, changed, sampled)


def weight_metrics(episodes: Sequence[Weighed]) -> dict[str, float]:
    """Over all sampled tokens: the weights' mean, max, and the fraction where the cap or the bound acted; {} of none.

    ``ess`` is Kish's effective sample size over the number of tokens, (sum w)² / (n sum w²): 1 when all are equal.
    """
    weights = np.concatenate([found.weights[found.mask] for found in episodes]) if episodes else np.zeros(0)
    if not weights.size:
        return {}
    changed = np.concatenate([found.changed[found.mask] for found in episodes])
    squares = float(np.sum(weights**2))
    return {
        "importance/mean": float(weights.mean()),
        "importance/max": float(weights.max()),
        "importance/truncated": float(changed.mean()),
        "importance/ess": float(np.sum(weights) ** 2 / (len(weights) * squares)) if squares else 0.0,
    }


_Found: TypeAlias = tuple[ArrayLike, ArrayLike]


def _none(log_ratio: Array, cap: float) -> _Found:
    return 1.0, False


def _truncated(log_ratio: Array, cap: float) -> _Found:
    ratio = _exp(log_ratio)
    return np.minimum(ratio, cap), ratio > cap


def _masked(log_ratio: Array, cap: float) -> _Found:
    outside = np.abs(log_ratio) > np.log(cap)
    return np.where(outside, 0.0, _exp(log_ratio)), outside


def _sequence(log_ratio: Array, cap: float) -> _Found:
    return _truncated(log_ratio.mean(keepdims=True), cap)


def _sequence_truncated(log_ratio: Array, cap: float) -> _Found:
    return _truncated(log_ratio.sum(keepdims=True), cap)


def _sequence_masked(log_ratio: Array, cap: float) -> _Found:
    ratio = _exp(log_ratio.sum(keepdims=True))
    return np.where(ratio > cap, 0.0, ratio), ratio > cap


def _exp(log_ratio: Array) -> Array:
    return np.exp(np.minimum(log_ratio, _MOST))


CORRECTIONS: Mapping[str, Callable[[Array, float], _Found]] = {
    "none": _none,
    "truncated": _truncated,
    "masked": _masked,
    "sequence": _sequence,
    "sequence_truncated": _sequence_truncated,
    "sequence_masked": _sequence_masked,
}
"""By name; each is given the log-ratios [T] of the sampled tokens and the cap."""
