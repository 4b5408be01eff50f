"""Log-probabilities from logits: one function for trainer and sampler, so that equal logits give equal bits."""

from __future__ import annotations

import torch
from torch import Tensor

from gradserve.compute.engine.memory_plan import LOGITS_AT_ONCE


def log_softmax_(logits: Tensor) -> Tensor:
    """Turn float32 logits [M, V] into log-probabilities, in place; a row's result depends on that row alone.

    In blocks that stay in a core's cache between the passes of a softmax.
    """
    for block in torch.split(logits, max(1, LOGITS_AT_ONCE // logits.shape[1])):
        block.copy_(torch.log_softmax(block, -1))
    return logits
