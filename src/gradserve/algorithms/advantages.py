"""What an answer is worth beside the others of its group, and how much a token of it weighs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Advantage = Literal["grpo", "dr_grpo", "rloo"]
Normalisation = Literal["sequence", "constant", "token"]

_EPSILON = 1e-6
"""Keeps the advantages of rewards that differ by rounding small."""
_CACHE = 0.2
"""The part of the token limit in which DAPO's penalty grows; 4,096 of 20,480 tokens in the paper."""


def group_advantages(rewards: Sequence[float] | Floats, kind: Advantage) -> Floats:
    """[G] advantages of the G answers to one prompt.

    grpo: (r - mean) / (std + 1e-6), with the standard deviation of the group, over G - 1 (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2). dr_grpo: r - mean (Liu et al. 2025, arXiv:2503.20783). rloo: r less the mean of
    the others (Ahmadian et al. 2024, arXiv:2402.14740). One answer alone has the advantage 0.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], "dr_grpo").tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    values: Floats = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2:
        return np.zeros(len(values))
    centred: Floats = values - values.mean()
    match kind:
        case "grpo":
            centred /= values.std(ddof=1) + _EPSILON
        case "dr_grpo":
            pass
        case "rloo":
            centred *= len(values) / (len(values) - 1)
    return centred


def token_weight(kind: Normalisation, length: int, sequences: int, tokens: int, max_tokens: int) -> float:
    """The factor of each token's loss in a batch of ``sequences`` answers of ``tokens`` tokens together.

    sequence: the mean over an answer's ``length`` tokens, then over answers (GRPO). constant: over answers and
    ``max_tokens`` (Dr. GRPO: no advantage for long wrong answers). token: over all tokens of the batch (DAPO).

    >>> token_weight("sequence", 5, sequences=4, tokens=40, max_tokens=100)
    0.05
    """
    match kind:
        case "sequence":
            return 1.0 / (sequences * max(length, 1))
        case "constant":
            return 1.0 / (sequences * max_tokens)
        case "token":
            return 1.0 / max(tokens, 1)


def soft_overlong_penalty(length: int, max_tokens: int) -> float:
    """From 0 at 80 % of the limit to -1 at the limit (Yu et al. 2025, arXiv:2503.14476, equation 13).

    >>> [soft_overlong_penalty(length, 100) for length in (80, 90, 100)]
    [0.0, -0.5, -1.0]
    """
    cache = max(1.0, _CACHE * max_tokens)
    return float(np.clip((max_tokens - cache - length) / cache, -1.0, 0.0)) + 0.0
