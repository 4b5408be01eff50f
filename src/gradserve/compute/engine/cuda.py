"""Kernels for CUDA devices: all sequences of a training pass in one variable-length attention call.

Where torch has no such kernel for a number format (float32), they go as on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from gradserve.compute.engine.kernels import Fast

_FORMATS = (torch.bfloat16, torch.float16)


class Cuda(Fast):
    """torch's kernels, with variable-length attention (FlashAttention; Dao 2023, arXiv:2307.08691) for packed rows."""

    def packed(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None) -> Tensor:
        """See Kernels."""
        if q.dtype not in _FORMATS:
            return super().packed(q, k, v, lengths, scale, window)
        bounds = torch.tensor([0, *lengths], device=q.device).cumsum(0).to(torch.int32)
        longest = max(lengths)
        before = -1 if window is None else window - 1
        out = varlen_attn(
            q.transpose(0, 1).contiguous(),
            k.transpose(0, 1).contiguous(),
            v.transpose(0, 1).contiguous(),
            cu_seq_q=bounds,
            cu_seq_k=bounds,
            max_q=longest,
            max_k=longest,
            scale=scale,
            window_size=(before, 0),
            enable_gqa=q.shape[0] != k.shape[0],
        )
        assert isinstance(out, Tensor)
        return out
