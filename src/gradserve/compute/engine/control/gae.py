"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def advantages(
    rewards: NDArray[Any],
    values: NDArray[Any],
    next_values: NDArray[Any],
    ended: NDArray[np.bool_],
    gamma: float,
    gae_lambda: float,
) -> NDArray[np.float64]:
    """A_t [T, n] = delta_t + gamma lambda A_(t+1), delta_t = r_t + gamma V(s_(t+1)) - V(s_t): equations 11 to 16.

    All inputs are [T, n]. ``next_values`` are those of the state each transition ended in: 0 where it is terminal, the
    critic's where the episode was truncated (Pardo et al. 2018, arXiv:1712.00378) or the rollout stops; so what is
    terminal and what was cut short differ in ``next_values`` alone. ``ended`` marks both: the sum over later
    deltas stops there, as they belong to another episode.
    """
    deltas = rewards.astype(np.float64) + gamma * next_values.astype(np.float64) - values.astype(np.float64)
    decay = gamma * gae_lambda * ~ended
    result = np.empty_like(deltas)
    later = np.zeros(deltas.shape[1:])
    for t in range(len(deltas) - 1, -1, -1):
        later = deltas[t] + decay[t] * later
        result[t] = later
    return result
