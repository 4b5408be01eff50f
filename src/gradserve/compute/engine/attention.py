"""Attention over packed tokens, for unmodified transformers modelling code.

A pass is one row [1, N] of tokens of many sequences. What may see what is said by a *layout*, which travels
through the model's keyword arguments to :func:`layout_attention`; transformers builds no mask.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "gradserve"
"""The attention implementation's name in transformers' registries."""

_REFUSED = ("softcap", "s_aux", "position_bias", "logits_soft_cap")
"""Keyword arguments by which other families change the scores; silently dropping one would give wrong numbers."""


class Layout(Protocol):
    """Which tokens of a pass attend to which."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [H, N, D], k and v [Hkv, N, D] -> [N, H, D]. ``window``: a token sees itself and window - 1 before."""
        ...


class PackedLayout:
    """Whole sequences one after another, each causal and blind to the others. Used for training; keeps nothing."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See Layout."""
        qs, ks, vs = (torch.split(tensor, self._lengths, dim=1) for tensor in (q, k, v))
        rows = zip(qs, ks, vs, strict=True)
        return torch.cat([attend_causal(*row, scale=scale, window=window) for row in rows])


def attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """q [H, n, D], k and v [Hkv, m, D] -> [n, H, D]: the queries are the last n of m positions of one sequence."""
    n, m = q.shape[1], k.shape[1]
    if window is not None and m > window:
        return torch.cat([_attend_in_window(q, k, v, scale, window, at) for at in range(0, n, _BLOCK)])
    mask = None if n == m else _band(n, m, None, q.device)
    return _attend(q, k, v, scale, mask)


_BLOCK = 512
"""Queries taken together under a window: each block meets the keys it can see, not all of them."""


def _attend_in_window(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, at: int) -> Tensor:
    n, m = q.shape[1], k.shape[1]
    end = min(at + _BLOCK, n)
    last = m - n + end
    first = max(0, m - n + at - window + 1)
    mask = _band(end - at, last - first, window, q.device)
    return _attend(q[:, at:end], k[:, first:last], v[:, first:last], scale, mask)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Causal where there is no mask."""
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _band(n: int, m: int, window: int | None, device: torch.device) -> Tensor:
    """bool [n, m]: query i is key m - n + i and sees itself and, at most, the window - 1 keys before."""
    at = torch.arange(m - n, m, device=device)[:, None]
    seen = torch.arange(m, device=device)[None, :]
    mask = seen <= at
    return mask if window is None else mask & (seen > at - window)


def layout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layout,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, N, D], key and value [1, Hkv, N, D] -> [1, N, H, D].

    Raises NotImplementedError for whatever would change the scores and is not honoured here.
    """
    refused = [name for name in _REFUSED if others.get(name) is not None]
    if refused or dropout or attention_mask is not None:
        raise NotImplementedError(
            f"attention with {refused or 'dropout or a mask'} is not supported by gradserve's packed attention"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = layout.attend(layer, query[0], key[0], value[0], scaling, sliding_window)
    return out[None], None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The layout knows; a mask over N x N packed tokens would be quadratic in the batch."""


AttentionInterface.register(NAME, layout_attention)
AttentionMaskInterface.register(NAME, _no_mask)
