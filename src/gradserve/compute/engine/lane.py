"""Continuous batching of the requests of one base.

A request's prompt is a *stem*: prefilled once, in pieces, from the longest prefix that is still known, then copied
into a slot for each of its sequences, which decode one token per pass. All of a pass, decoding rows and pieces of
stems, goes through the model together. Sequences and stems have an age, (request, sample); memory is held by rows
(sequences in slots) and open stems.

Invariant: the oldest always makes progress, so everything ends. For
- room is given in order of age: a stem that is refused room stops all younger ones from taking any (those that only
  wait for their turn to compute, or for an older stem to compute what both begin with, are passed over);
- room is taken from the youngest: a row that needs its next place, or a complete stem that needs a slot, evicts
  holders younger than itself until it has room or is the youngest; an evicted row is prefilled again later;
- the only holder gets room even beyond the bound, up to the model's context.
So the oldest, if it is a row, decodes in every pass. If it is an open stem, it gets a piece of every pass (rows take
at most half of one) and, once complete, a slot. If it holds nothing, what is left are younger rows and stems that
grow or are evicted, and none may join them: they end, and it is then alone.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradserve.compute.engine.arrange import Arrangement, Piece, arrange
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.choose import Chooser, Settings
from gradserve.compute.engine.decode import SamplingLayout
from gradserve.compute.engine.kv import KvCache
from gradserve.compute.engine.lora import route
from gradserve.compute.engine.prefix import BLOCK, chain
from gradserve.compute.engine.rng import U64, streams, uniform
from gradserve.compute.engine.sequences import Request, Sequence, Stem
from gradserve.wire.errors import Invalid

LOGITS = 1 << 24
"""Logits that exist at one time: rows of the vocabulary are computed in blocks of about so many numbers."""

SMALLEST_PIECE = 16
"""A pass is not cut into smaller pieces for the sake of fairness."""

Ended = tuple[Request, Exception | None]


@dataclass(frozen=True)
class Passed:
    """What a pass did: the sequences that got a token, and the requests that it ended (with an error: failed)."""

    drawn: list[Sequence]
    ended: list[Ended]


@dataclass(frozen=True)
class _Drawing:
    """What drawing for ``sequences`` needs and only changes with them."""

    sequences: list[Sequence]
    chooser: Chooser
    keys: U64

    @classmethod
    def of(cls, sequences: list[Sequence], device: torch.device) -> _Drawing:
        params = [sequence.request.params for sequence in sequences]
        settings = Settings.of(
            [p.temperature for p in params], [p.top_k for p in params], [p.top_p for p in params], device
        )
        return cls(
            sequences, Chooser(settings), streams([p.seed for p in params], [sequence.index for sequence in sequences])
        )


class Lane:
    """``step`` is one pass. Not thread-safe."""

    def __init__(self, base: Base, kv_cache_bytes: int, pass_tokens: int) -> None:
        self._base = base
        self._kv = KvCache(base.config, base.context, kv_cache_bytes, base.device)
        self._pass_tokens = pass_tokens
        self._most_rows = max(1, pass_tokens // 2)
        self._line: list[Stem] = []  # oldest first
        self._pieces: list[Piece] = []
        self._block = max(1, LOGITS // base.vocab)
        self._drawings: dict[int, _Drawing] = {}

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._line) or bool(self._kv.pools())

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._line.append(Stem(request, request.prompt, list(request.sequences), draws=True))

    def cancel(self, request: Request) -> None:
        """Forget a request and free all that it holds."""
        self._drop([request])

    @torch.no_grad()
    def step(self) -> Passed:
        """One pass. An error fails all requests that the pass was about."""
        try:
            return self._step()
        except Exception as error:
            held = [row.request for row in self._kv.rows()]
            held += [stem.request for stem in self._line if stem.kv is not None]
            held += [piece.stem.request for piece in self._pieces]
            return Passed([], [(request, error) for request in self._drop(held)])
        finally:
            if not self.busy:
                self._drawings.clear()  # they keep adapters in memory

    def _step(self) -> Passed:
        started = time.perf_counter_ns()
        self._pieces = []
        self._make_places()
        self._place_waiting()
        self._plan_pieces()
        arranged = arrange(self._kv.pools(), self._pieces)
        hidden = self._forward(arranged)
        self._score_prompts(arranged, hidden)
        drawn, source = self._advance(arranged)
        broken = self._draw(drawn, source, hidden)
        self._account(arranged, time.perf_counter_ns() - started)
        failed = [(request, _not_finite()) for request in self._drop(broken)]
        good = [sequence for sequence in drawn if sequence.request not in broken]
        return Passed(good, [*failed, *self._settle(good)])

    # Places ----------------------------------------------------------------------------------------------------

    def _make_places(self) -> None:
        """Every row gets a place for its next token; the youngest holders go when there is none."""
        for row in sorted(self._kv.rows(), key=_age):
            while row.pool is not None and not self._kv.make_next_place(row, force=self._holders() == [row]):
                self._evict(self._holders()[-1])

    def _holders(self) -> list[Sequence | Stem]:
        """All that holds memory, oldest first."""
        return sorted([*self._kv.rows(), *(stem for stem in self._line if stem.kv is not None)], key=_age)

    def _evict(self, holder: Sequence | Stem) -> None:
        """Take a holder's memory; a row becomes a stem again."""
        if isinstance(holder, Stem):
            self._kv.close(holder)
            return
        self._kv.remove(holder)
        ids = np.concatenate([holder.request.prompt, np.array(holder.tokens[:-1], dtype=np.int32)])
        bisect.insort(self._line, Stem(holder.request, ids, [holder], draws=False), key=_age)

    def _place_waiting(self) -> None:
        """Sequences of complete stems get slots, in order, as far as there is room."""
        for stem in list(self._line):
            if stem.complete:
                while stem.waiting:
                    if len(self._kv.rows()) >= self._most_rows or not self._place(stem):
                        return
                self._kv.close(stem)
                self._line.remove(stem)

    def _place(self, stem: Stem) -> bool:
        """A slot for the stem's first waiting sequence, at the cost of younger holders; False: not now."""
        while not self._kv.place(stem.waiting[0], stem, force=self._holders() == [stem]):
            youngest = self._holders()[-1]
            if youngest is stem:
                return False
            self._evict(youngest)
        stem.waiting.pop(0)
        return True

    def _plan_pieces(self) -> None:
        """What to prefill in this pass: the older the more, but each at most half of what is left for those behind."""
        rows = len(self._kv.rows())
        budget = self._pass_tokens - rows
        counts: dict[Stem, int] = {}
        coming: set[bytes] = set()
        for stem in self._line:
            if budget == 0:
                break
            if not stem.complete:
                if self._waits(stem, coming):
                    continue
                share = budget if stem is self._line[-1] else min(budget, max(SMALLEST_PIECE, budget // 2))
                if not self._open(stem, share, rows):
                    break
                counts[stem] = min(share, len(stem.ids) - stem.done)
                budget -= counts[stem]
                if stem.kv is not None:
                    coming.update(stem.names[stem.done // BLOCK :])
            rows += 0 if stem.ends_at_once else len(stem.waiting)
        for stem, count in counts.items():  # what nobody else needed
            counts[stem] = min(count + budget, len(stem.ids) - stem.done)
            budget -= counts[stem] - count
        self._pieces = [Piece(stem, count) for stem, count in counts.items()]

    def _waits(self, stem: Stem, coming: set[bytes]) -> bool:
        """Whether an older stem is about to compute the block with which this one would begin."""
        if stem.kv is not None:
            return False
        known = self._kv.cached_blocks(stem.readable)
        return known < len(stem.readable) and stem.readable[known] in coming

    def _open(self, stem: Stem, share: int, rows: int) -> bool:
        """Memory for the stem, unless it needs none; False: not now. ``rows`` are those before it in line."""
        if stem.kv is not None:
            return True
        if not stem.ends_at_once or share < len(stem.ids) or self._kv.cached_blocks(stem.readable):
            if self._kv.live_tokens and (rows >= self._most_rows or not self._kv.has_room_for(stem)):
                return False
            self._kv.open(stem)
        if stem.request.cached_tokens is None:
            stem.request.cached_tokens = stem.done
        return True

    # The pass --------------------------------------------------------------------------------------------------

    def _forward(self, arranged: Arrangement) -> Tensor:
        """Hidden states of the pass's tokens."""
        device = self._base.device
        layout = SamplingLayout(self._kv.pools(), arranged, device)
        tokens = torch.tensor(arranged.tokens, device=device)
        positions = torch.tensor(arranged.positions, device=device)
        with self._base.routed(route(arranged.runs, device)):
            return self._base.hidden(tokens, positions, layout)

    def _score_prompts(self, arranged: Arrangement, hidden: Tensor) -> None:
        """Scores of the pieces; the last position of a prompt scores nothing of it."""
        for piece, at in arranged.pieces:
            stem, scores = piece.stem, piece.stem.request.scores
            if scores is None or not stem.draws:
                continue
            for a, b in _blocks(min(piece.count, len(stem.ids) - 1 - stem.done), self._block):
                with self._base.routed(route([(stem.request.adapter, b - a)], self._base.device)):
                    scores.write(stem.done + a, self._base.logits(hidden[at + a : at + b]))

    def _advance(self, arranged: Arrangement) -> tuple[list[Sequence], list[int]]:
        """Note what is cached now. Returns the sequences that get a token and which hidden state gives it, in order."""
        drawn = list(arranged.rows)
        for row, _ in arranged.rows:
            row.cached += 1
        for piece, at in arranged.pieces:
            stem = piece.stem
            stem.done += piece.count
            if stem.kv is not None:
                self._kv.remember(stem.names[: stem.done // BLOCK], stem)
            if stem.complete and stem.draws:
                drawn += [(sequence, at + piece.count - 1) for sequence in stem.waiting]
        drawn.sort(key=lambda pair: pair[1])  # so that each adapter's states still lie together
        return [sequence for sequence, _ in drawn], [at for _, at in drawn]

    def _draw(self, drawn: list[Sequence], source: list[int], hidden: Tensor) -> dict[Request, None]:
        """Each sequence takes a token. Returns the requests whose logits are not numbers."""
        broken: dict[Request, None] = {}
        for a, b in _blocks(len(drawn), self._block):
            part = drawn[a:b]
            for sequence, logprob in zip(part, self._draw_part(a, part, source[a:b], hidden), strict=True):
                if logprob != logprob:  # nan
                    broken[sequence.request] = None
        return broken

    def _draw_part(self, at: int, part: list[Sequence], source: list[int], hidden: Tensor) -> list[float]:
        """One block of ``_draw``, the one that begins at ``at``. Returns the log-probs."""
        if at not in self._drawings or self._drawings[at].sequences != part:
            self._drawings[at] = _Drawing.of(part, self._base.device)
        drawing = self._drawings[at]
        logits = self._logits(part, source, hidden)
        u = torch.from_numpy(uniform(drawing.keys, [len(sequence.tokens) for sequence in part]))
        tokens = drawing.chooser.choose(logits, u.to(self._base.device))
        total = logits.logsumexp(-1, keepdim=True)  # as the trainer does it, so that equal logits give equal log-probs
        logprobs: list[float] = (logits.gather(1, tokens[:, None]) - total)[:, 0].tolist()
        for sequence, token, logprob in zip(part, tokens.tolist(), logprobs, strict=True):
            sequence.take(token, logprob)
        _take_best(part, logits, total)
        return logprobs

    def _logits(self, part: list[Sequence], source: list[int], hidden: Tensor) -> Tensor:
        """[sequences, V]; a state that several sequences share goes through the head once."""
        states = list(dict.fromkeys(source))
        adapters = {state: sequence.request.adapter for state, sequence in zip(source, part, strict=True)}
        contiguous = states[-1] - states[0] == len(states) - 1
        chosen = hidden[states[0] : states[-1] + 1] if contiguous else hidden[states]
        with self._base.routed(route([(adapters[state], 1) for state in states], self._base.device)):
            logits = self._base.logits(chosen)
        if len(states) == len(source):
            return logits
        row = {state: index for index, state in enumerate(states)}
        return logits[[row[state] for state in source]]

    # After the pass --------------------------------------------------------------------------------------------

    def _account(self, arranged: Arrangement, elapsed_ns: int) -> None:
        """Divide the pass among its requests by their tokens in it."""
        each_us = elapsed_ns / 1000 / max(1, len(arranged.tokens))
        for row, _ in arranged.rows:
            row.request.compute_us += each_us
        for piece, _ in arranged.pieces:
            piece.stem.request.compute_us += each_us * piece.count

    def _settle(self, drawn: list[Sequence]) -> list[Ended]:
        """Free what finished sequences hold; the requests that are complete now."""
        ended = [sequence for sequence in drawn if sequence.finished]
        for sequence in ended:
            if sequence.pool is not None:
                self._kv.remember(_names(sequence), sequence)
                self._kv.remove(sequence)
        for stem in [piece.stem for piece in self._pieces if piece.stem.complete and piece.stem.draws]:
            stem.draws = False
            stem.waiting = [sequence for sequence in stem.waiting if not sequence.finished]
            if not stem.waiting and stem in self._line:
                self._kv.close(stem)
                self._line.remove(stem)
        return [(request, None) for request in {s.request: None for s in ended} if request.finished]

    def _drop(self, requests: Iterable[Request]) -> list[Request]:
        """Forget all that is held for these requests."""
        gone = dict.fromkeys(requests)
        if not gone:
            return []
        for row in [row for row in self._kv.rows() if row.request in gone]:
            self._kv.remove(row)
        for stem in [stem for stem in self._line if stem.request in gone]:
            self._kv.close(stem)
            self._line.remove(stem)
        return list(gone)


def _age(holder: Sequence | Stem) -> tuple[int, int]:
    return holder.age


def _blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of blocks of at most ``size``."""
    return ((at, min(at + size, count)) for at in range(0, count, size))


def _names(row: Sequence) -> list[bytes]:
    """The prefix cache's names of what a row has cached, prompt and all."""
    ids = np.concatenate([row.request.prompt, np.array(row.tokens, dtype=np.int32)])
    return chain(row.request.weights, ids[: row.cached])


def _take_best(part: list[Sequence], logits: Tensor, total: Tensor) -> None:
    """Hand the best K of its position to each sequence that wants them; total is logsumexp [B, 1] of logits [B, V]."""
    rows = [row for row, sequence in enumerate(part) if sequence.request.topk]
    if not rows:
        return
    best = logits[rows].topk(max(part[row].request.topk for row in rows))
    ids, logprobs = best.indices.tolist(), (best.values - total[rows]).tolist()
    for index, row in enumerate(rows):
        topk = part[row].request.topk
        part[row].topk_ids.append(ids[index][:topk])
        part[row].topk_logprobs.append(logprobs[index][:topk])


def _not_finite() -> Invalid:
    return Invalid("non_finite", "the weights give logits that are not finite", fix="Sample from an earlier version.")
