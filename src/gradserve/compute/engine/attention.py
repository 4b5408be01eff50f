"""Attention over packed tokens, for unmodified transformers modelling code.

A pass is one row [1, N] of tokens of many sequences. What may see what is said by a *layout*, which travels
through the model's keyword arguments to :func:`layout_attention`; transformers builds no mask.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from gradserve.compute.engine.kernels import FAST, Kernels

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

    def __init__(self, lengths: list[int], kernels: Kernels = FAST) -> None:
        self._lengths = lengths
        self._kernels = kernels

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See Layout."""
        return self._kernels.packed(q, k, v, self._lengths, scale, window)


class Filled:
    """A layout whose pass was filled up: the rows beyond ``count`` attend to nothing and nobody reads them."""

    def __init__(self, layout: Layout, count: int) -> None:
        self._layout = layout
        self._count = count

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See Layout."""
        count = self._count
        out = self._layout.attend(layer, q[:, :count], k[:, :count], v[:, :count], scale, window)
        return F.pad(out, (0, 0, 0, 0, 0, q.shape[1] - count))


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
