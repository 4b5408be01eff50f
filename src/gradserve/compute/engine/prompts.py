"""Scores of the prompt itself: log-probs of its tokens, the best K, and those of given targets.

The distribution at position i scores position i + 1, so position 0 has no score. Letters: P prompt tokens,
K candidates, M positions of one chunk. Writing a chunk twice changes nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradserve.wire.data import Array
from gradserve.wire.ops import Sample
from gradserve.wire.results import TopK

EMPTY_LOGPROB = -99999.0
"""The log-prob of an empty cell of topk_prompt_logprobs; its id is 0."""


class PromptScores:
    """Collects the scores that one request asks for."""

    def __init__(self, op: Sample, prompt: NDArray[np.int32], vocab: int) -> None:
        length, best = len(prompt), min(op.topk_prompt_logprobs, vocab)
        self._next = torch.from_numpy(prompt[1:].astype(np.int64))
        self._wants_logprobs = op.prompt_logprobs
        self._logprobs = np.full(length, np.nan, dtype=np.float32)
        self._best_ids = np.zeros((length, best), dtype=np.int32)
        self._best = np.full((length, best), EMPTY_LOGPROB, dtype=np.float32)
        self._target_ids = _target_ids(op, length)
        self._targets = None if self._target_ids is None else np.zeros(self._target_ids.shape, dtype=np.float32)
        self.first = 0 if op.prompt_logprobs or best else _first_target(self._target_ids, length)
        """The first position whose distribution is needed."""

    @staticmethod
    def wanted(op: Sample) -> bool:
        """Whether the request asks for any score."""
        return op.prompt_logprobs or op.topk_prompt_logprobs > 0 or op.target_prompt_ids is not None

    def write(self, start: int, logits: Tensor) -> None:
        """``logits`` [M, V] are those at positions start .. start + M - 1, all before the last one."""
        end = start + logits.shape[0]
        total = logits.logsumexp(-1, keepdim=True)  # as the trainer does it, so that equal logits give equal log-probs
        if self._wants_logprobs:
            own = logits.gather(1, self._next[start:end, None].to(logits.device)) - total
            self._logprobs[start + 1 : end + 1] = own[:, 0].cpu().numpy()
        if self._best.shape[1]:
            best = logits.topk(self._best.shape[1], -1)
            self._best[start + 1 : end + 1] = (best.values - total).cpu().numpy()
            self._best_ids[start + 1 : end + 1] = best.indices.cpu().numpy()
        if self._target_ids is not None and self._targets is not None:
            ids = self._target_ids[start:end].to(logits.device)
            found = (logits.gather(1, ids.clamp(min=0)) - total).masked_fill(ids < 0, 0.0)
            self._targets[start:end] = found.cpu().numpy()

    def logprobs_bytes(self) -> bytes | None:
        """float32 [P], nan at 0."""
        return self._logprobs.tobytes() if self._wants_logprobs else None

    def topk(self) -> TopK | None:
        """[P, K]"""
        return TopK(Array.of(self._best_ids), Array.of(self._best)) if self._best.shape[1] else None

    def targets(self) -> Array | None:
        """float32 [P - 1, K], 0 where the id is -1."""
        return None if self._targets is None else Array.of(self._targets)


def _target_ids(op: Sample, length: int) -> Tensor | None:
    if op.target_prompt_ids is None:
        return None
    ids = op.target_prompt_ids.numpy().astype(np.int64)
    return torch.from_numpy(ids.reshape(length - 1, -1) if length > 1 else ids.reshape(0, ids.shape[-1]))


def _first_target(target_ids: Tensor | None, length: int) -> int:
    """The first row of ``target_ids`` [P - 1, K] that is not all empty; P if there is none."""
    rows = [] if target_ids is None else (target_ids >= 0).any(1).nonzero()[:1, 0].tolist()
    first: int = rows[0] if rows else length
    return first
