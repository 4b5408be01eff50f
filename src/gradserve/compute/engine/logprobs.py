"""Log-probabilities from logits: one function for trainer and sampler, so that equal logits give equal bits."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1 << 16
"""Numbers taken together: 256 KiB, which stay in a core's cache between the passes of a softmax."""


def log_softmax_(logits: Tensor) -> Tensor:
    """Turn float32 logits [M, V] into log-probabilities, in place; a row's result depends on that row alone."""
    for block in torch.split(logits, max(1, _BLOCK // logits.shape[1])):
        block.copy_(torch.log_softmax(block, -1))
    return logits
