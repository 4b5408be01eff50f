"""Whether another engine computes what the trainer computes, by measurement: the log-probs of a fixed probe.

An engine that skips a module, scales an adapter otherwise or still holds older weights raises no error; its samples
only come from another distribution than the one whose gradient is taken. So each set of weights is compared once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradserve.compute.engine.base import Base
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.engine.train import score
from gradserve.wire.data import Array, Row, as_tokens
from gradserve.wire.errors import Invalid

PROMPT_TOKENS = 32
DRAWN_TOKENS = 4
"""Tokens to draw after the prompt: the first comes from a prefill, the others from decode passes."""

BEST = 64
"""Log-probs compared at each drawn position: a saturated token alone would hide a difference."""

BOUND = 1e-3
"""The largest |log-prob difference| that is accepted.

Two float32 engines differ by up to 1e-4 (measured on SmolLM2: 3e-5). An adapter that is not applied, applied in part
or scaled wrongly differs by as much as it changes the model; below this bound that is a factor of 1.001 in a ratio.
"""


@dataclass(frozen=True)
class Fingerprint:
    """``worst`` and ``mean`` |log-prob of the engine - log-prob of the trainer| over ``count`` of them."""

    worst: float
    mean: float
    count: int

    @property
    def accepted(self) -> bool:
        """Never for nan."""
        return self.worst <= BOUND

    def __str__(self) -> str:
        return f"{self.worst:.1e} at most and {self.mean:.1e} on average ({self.count} log-probs, bound {BOUND:.0e})"


def probe(vocab: int) -> NDArray[np.int32]:
    """The prompt, the same for every adapter of a vocabulary."""
    return np.random.default_rng(0).integers(0, vocab, PROMPT_TOKENS).astype(np.int32)


def compare(base: Base, weights: Tensors, drawn: list[int], best: list[list[tuple[int, float]]]) -> Fingerprint:
    """``best[i]`` are the engine's (id, log-prob) where it drew ``drawn[i]`` after the probe; K of them everywhere."""
    ids = np.array([[id for id, _ in position] for position in best], dtype=np.int64)
    theirs = np.array([[logprob for _, logprob in position] for position in best])
    ours = _trainer_logprobs(base, weights, np.concatenate([probe(base.vocab), drawn[:-1]]), ids)
    difference = np.abs(theirs - ours)
    return Fingerprint(float(difference.max()), float(difference.mean()), difference.size)


def _trainer_logprobs(
    base: Base, weights: Tensors, tokens: NDArray[np.int32], candidates: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Log-probs [M, K] of ``candidates`` at the last M positions of ``tokens``, by the code of every GradTask."""
    targets = np.zeros((len(tokens), candidates.shape[1]), dtype=np.int64)
    targets[-len(candidates) :] = candidates
    row = Row(as_tokens(tokens), {"target_tokens": Array.of(targets)})
    try:
        result = score(base, weights, [row])
    except Invalid as error:
        raise Invalid(error.code, f"these weights can't be checked: {error.detail}") from error
    found: NDArray[np.float32] = result.logprobs[0].numpy()[-len(candidates) :].astype(np.float32)
    return found
