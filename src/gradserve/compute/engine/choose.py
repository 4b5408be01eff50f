"""From logits to tokens: temperature, top-k, top-p and the inverse CDF, vectorised over rows.

Letters: B rows, V vocabulary. Invariant: a row's choice depends only on its logits, settings and ``u``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_FIRST_CANDIDATES = 1024
"""How many of the best tokens top-p looks at before it looks at more; few distributions need them all."""

_CHUNK = 256
"""Tokens whose weights are summed before the whole vocabulary is: a running float64 sum of all of it is slow."""


@dataclass(frozen=True)
class Settings:
    """Per row [B]: temperature (0: the most probable token), top_k (< 1: off), top_p (>= 1: off)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, temperature: list[float], top_k: list[int], top_p: list[float], device: torch.device) -> Settings:
        """Tensors of the types that choose works with."""
        return cls(
            torch.tensor(temperature, dtype=torch.float32, device=device),
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
        )

    def pick(self, rows: Tensor) -> Settings:
        """Those of some rows."""
        return Settings(self.temperature[rows], self.top_k[rows], self.top_p[rows])


_Draw = Callable[[Tensor, Settings, Tensor], Tensor]


class Chooser:
    """Draws for rows of fixed ``settings``. Which rows need which kind of draw is found out once, here."""

    def __init__(self, settings: Settings) -> None:
        warm = settings.temperature > 0
        filtered = warm & ((settings.top_k > 0) | (settings.top_p < 1))
        kinds: list[tuple[Tensor, _Draw]] = [(~warm, _best_token), (warm & ~filtered, _draw_plain)]
        kinds.append((filtered, _draw_filtered))
        self._parts = [(rows.nonzero()[:, 0], settings.pick(rows), draw) for rows, draw in kinds if bool(rows.any())]

    def choose(self, logits: Tensor, u: Tensor) -> Tensor:
        """logits [B, V], u float64 [B] in [0, 1) -> tokens int64 [B]. A logit that is nan gives any token."""
        if len(self._parts) == 1:
            _, settings, draw = self._parts[0]
            return draw(logits, settings, u)
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        for rows, settings, draw in self._parts:
            tokens[rows] = draw(logits[rows], settings, u[rows])
        return tokens


def _best_token(logits: Tensor, _settings: Settings, _u: Tensor) -> Tensor:
    """The first of the best. By chunks: argmax is several times slower than amax."""
    parts = _chunks(logits, -torch.inf)
    chunk = parts.amax(-1).argmax(-1)
    return chunk * _CHUNK + _chunk_of(parts, chunk).argmax(-1)


def _draw_plain(logits: Tensor, settings: Settings, u: Tensor) -> Tensor:
    weights = _shifted(logits, settings).exp_()
    parts = _chunks(weights, 0.0)
    mass = parts.sum(-1)
    reached = mass.cumsum(1, dtype=torch.float64)
    goal = _goal(reached, u)
    chunk = _first_above(reached, goal)
    own = chunk[:, None]
    inside = (goal - (reached.gather(1, own) - mass.gather(1, own))) / mass.gather(1, own)
    tokens = chunk * _CHUNK + _invert(_chunk_of(parts, chunk), inside[:, 0].clamp(0, 1))
    return tokens.clamp(max=logits.shape[1] - 1)  # where all is nan the last chunk's filler would be drawn


def _shifted(logits: Tensor, settings: Settings) -> Tensor:
    """Tempered logits, at most 0. The maximum goes first, so that a tiny temperature gives -inf, not inf - inf."""
    return (logits - logits.amax(-1, keepdim=True)).div_(settings.temperature[:, None])


def _draw_filtered(logits: Tensor, settings: Settings, u: Tensor) -> Tensor:
    """Keep the top_k best, of these the fewest that reach top_p of their mass (Holtzman et al. 2020), and draw."""
    probabilities = _shifted(logits, settings).softmax(-1)
    vocab = probabilities.shape[1]
    count = min(vocab, max(_FIRST_CANDIDATES, 2 * int(settings.top_k.max())))
    while True:
        values, ids = _best(probabilities, count)
        kept, complete = _kept(values, settings, last=count == vocab)
        if complete:
            rank = _invert(values * kept, u)
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
    goal = (settings.top_p * mass)[:, None]
    kept = torch.arange(count, device=values.device)[None] < top_k[:, None]
    if bool((settings.top_p < 1).any()):
        kept &= (reached - values < goal) | (settings.top_p >= 1)[:, None]
    kept[:, 0] = True
    bounded = (settings.top_k > 0) | (reached[:, -1:] >= goal)[:, 0]
    return kept, last or bool(bounded.all())


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulated weight exceeds u times the total: one of weight zero is never chosen."""
    reached = weights.cumsum(1, dtype=torch.float64)
    return _first_above(reached, _goal(reached, u))


def _goal(reached: Tensor, u: Tensor) -> Tensor:
    """float64 [B, 1]: u times the total, which ends ``reached``, but always below it."""
    total = reached[:, -1]
    return torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))[:, None]


def _first_above(reached: Tensor, goal: Tensor) -> Tensor:
    return torch.searchsorted(reached, goal, right=True)[:, 0].clamp(max=reached.shape[1] - 1)


def _chunks(values: Tensor, filler: float) -> Tensor:
    """[B, V] -> [B, ceil(V / _CHUNK), _CHUNK]"""
    missing = -values.shape[1] % _CHUNK
    padded = F.pad(values, (0, missing), value=filler) if missing else values
    return padded.view(values.shape[0], -1, _CHUNK)


def _chunk_of(parts: Tensor, chunk: Tensor) -> Tensor:
    """[B, chunks, _CHUNK], chunk [B] -> [B, _CHUNK]"""
    return parts[torch.arange(len(chunk), device=chunk.device), chunk]
