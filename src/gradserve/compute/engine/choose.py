"""From logits to tokens: temperature, top-k, top-p and the inverse CDF, vectorised over rows.

Letters: B rows, V vocabulary. Invariant: a row's choice depends only on its logits, settings and ``u``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_CANDIDATES = 1024
"""How many of the best tokens top-p looks at before it looks at more; few distributions need them all."""


@dataclass(frozen=True)
class Settings:
    """Per row [B]: temperature (0: the most probable token), top_k (< 1: off), top_p (>= 1: off), u in [0, 1)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    u: Tensor


@dataclass(frozen=True)
class Chosen:
    """``tokens`` int64 [B]; ``logprobs`` float32 [B] and ``all_logprobs`` [B, V] are untempered and unfiltered."""

    tokens: Tensor
    logprobs: Tensor
    all_logprobs: Tensor


def choose(logits: Tensor, settings: Settings) -> Chosen:
    """logits [B, V]. A row with a logit that is nan gets a log-prob that is nan; nothing raises."""
    logprobs = logits.log_softmax(-1)
    warm = settings.temperature > 0
    filtered = warm & (((settings.top_k > 0) & (settings.top_k < logits.shape[1])) | (settings.top_p < 1))
    plain = warm & ~filtered
    if bool(plain.all()):
        tokens = _draw_plain(logits, settings)
    else:
        tokens = logits.argmax(-1)
        for rows, draw in ((plain, _draw_plain), (filtered, _draw_filtered)):
            if bool(rows.any()):
                tokens[rows] = draw(logits[rows], _pick(settings, rows))
    return Chosen(tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs)


def _pick(settings: Settings, rows: Tensor) -> Settings:
    return Settings(settings.temperature[rows], settings.top_k[rows], settings.top_p[rows], settings.u[rows])


def _draw_plain(logits: Tensor, settings: Settings) -> Tensor:
    return _invert(_probabilities(logits, settings), settings.u)


def _probabilities(logits: Tensor, settings: Settings) -> Tensor:
    """float32 [B, V]. The maximum goes first, so that a tiny temperature gives zeros, not inf - inf."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted.div_(settings.temperature[:, None]).softmax(-1)


def _draw_filtered(logits: Tensor, settings: Settings) -> Tensor:
    """Keep the top_k best, of these the fewest that reach top_p of their mass (Holtzman et al. 2020), and draw."""
    probabilities = _probabilities(logits, settings)
    vocab = probabilities.shape[1]
    count = min(vocab, max(_FIRST_CANDIDATES, 2 * int(settings.top_k.max())))
    while True:
        values, ids = _best(probabilities, count)
        kept, complete = _kept(values, settings, last=count == vocab)
        if complete:
            rank = _invert(values * kept, settings.u)
            return ids.gather(1, rank[:, None])[:, 0]
        count = min(vocab, 16 * count)


def _best(probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best, best first; of equals the lower id first."""
    ids = probabilities.topk(count, sorted=False).indices.sort(1).values
    values, order = probabilities.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _kept(values: Tensor, settings: Settings, last: bool) -> tuple[Tensor, bool]:
    """bool [B, count], and whether the candidates reach far enough for every row."""
    count = values.shape[1]
    reached = values.cumsum(1, dtype=torch.float64)
    top_k = torch.where(settings.top_k > 0, settings.top_k, count).clamp(max=count)
    mass = torch.where(settings.top_k > 0, reached.gather(1, top_k[:, None] - 1)[:, 0], 1.0)
    goal = (settings.top_p.double() * mass)[:, None]
    kept = torch.arange(count, device=values.device)[None] < top_k[:, None]
    if bool((settings.top_p < 1).any()):
        kept &= (reached - values < goal) | (settings.top_p >= 1)[:, None]
    kept[:, 0] = True
    bounded = (settings.top_k > 0) | (reached[:, -1:] >= goal)[:, 0]
    return kept, last or bool(bounded.all())


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulated weight exceeds u times the total: one of weight zero is never chosen."""
    reached = weights.cumsum(1, dtype=torch.float64)
    total = reached[:, -1]
    goal = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(reached, goal[:, None], right=True)[:, 0]
    return index.clamp(max=weights.shape[1] - 1)
