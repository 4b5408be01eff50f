"""How much memory this process has used, and whether an exception means that it asked for too much."""

from __future__ import annotations

import resource
import sys

import torch

_REFUSALS = ("can't allocate memory", "not enough memory", "cannot allocate memory")


def peak_rss_bytes() -> int:
    """The high-water mark of resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """torch's CPU allocator raises a bare RuntimeError, so its text has to be read."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(text in str(error).lower() for text in _REFUSALS)
