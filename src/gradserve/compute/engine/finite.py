"""Whether numbers are numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds NaN or an infinity: NaN wins both extremes, and an infinity is one of them."""
    extremes = [extreme for tensor in tensors for extreme in tensor.detach().aminmax()]
    return not extremes or bool(torch.stack(extremes).isfinite().all())
