"""Continuous batching of the requests of one base.

A request's prompt is a *stem*: prefilled once, in pieces, then copied into a slot for each of its sequences, which
decode one token per pass. All of a pass, decoding rows and pieces of stems, goes through the model together.
Requests start in the order they came. When memory runs out the newest sequence gives its slot up and is prefilled
again later, with the tokens it already has.

Invariant: the stems that hold memory are the first ones of the line, so a pass can always make progress.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from gradserve.compute.engine.base import Base
from gradserve.compute.engine.choose import Chosen, Settings, choose
from gradserve.compute.engine.decode import Piece, SamplingLayout
from gradserve.compute.engine.kv import KvCache
from gradserve.compute.engine.lora import Tensors, route
from gradserve.compute.engine.rng import uniform
from gradserve.compute.engine.sequences import Request, Sequence, Stem
from gradserve.wire.errors import Invalid

LOGITS = 1 << 24
"""Logits that exist at one time: rows of the vocabulary are computed in blocks of about so many numbers."""

Ended = tuple[Request, Exception | None]


class Lane:
    """``step`` is one pass. Not thread-safe. With ``parameters`` all its passes compute with these, not the base's."""

    def __init__(self, base: Base, kv_cache_bytes: int, pass_tokens: int, parameters: Tensors | None = None) -> None:
        self._base = base
        self._parameters = parameters
        self._kv = KvCache(base.config, base.context, kv_cache_bytes, base.device)
        self._pass_tokens = pass_tokens
        self._most_rows = max(1, pass_tokens // 2)
        self._stems: deque[Stem] = deque()
        self._pieces: list[Piece] = []
        self._block = max(1, LOGITS // base.vocab)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._stems) or bool(self._kv.pools())

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._stems.append(Stem(request, request.prompt, list(request.sequences), draws=True))

    @torch.no_grad()
    def step(self) -> list[Ended]:
        """One pass. Returns the requests that it ended; an error fails all requests that the pass was about."""
        try:
            with nullcontext() if self._parameters is None else self._base.parameters.replaced(self._parameters):
                return self._step()
        except Exception as error:
            held = [row.request for row in self._kv.rows()]
            held += [stem.request for stem in self._stems if stem.kv is not None]
            held += [piece.stem.request for piece in self._pieces]
            return [(request, error) for request in self._drop(held)]

    def _step(self) -> list[Ended]:
        started = time.perf_counter_ns()
        self._pieces = []
        self._make_places()
        self._place_waiting()
        self._plan_pieces()
        rows = self._kv.rows()
        hidden = self._forward(rows)
        self._score_prompts(hidden[len(rows) :])
        drawn, source = self._advance(rows)
        broken = self._draw(drawn, source, hidden)
        self._account(rows, time.perf_counter_ns() - started)
        failed = [(request, _not_finite()) for request in self._drop(broken)]
        return [*failed, *self._settle([sequence for sequence in drawn if sequence.request not in broken])]

    # Places ----------------------------------------------------------------------------------------------------

    def _make_places(self) -> None:
        """Every row gets a place for its next token; the newest sequences go when there is none."""
        for row in sorted(self._kv.rows(), key=_age):
            while row.pool is not None and not self._kv.make_next_place(row, force=False):
                if self._kv.rows() == [row] and not any(stem.kv for stem in self._stems):
                    self._kv.make_next_place(row, force=True)  # a single sequence may go on to the full context
                else:
                    self._evict()

    def _evict(self) -> None:
        """Take memory from the newest: a stem first, else a row, which becomes a stem again."""
        for stem in reversed(self._stems):
            if stem.kv is not None:
                self._kv.close(stem)
                return
        row = max(self._kv.rows(), key=_age)
        self._kv.remove(row)
        ids = np.concatenate([row.request.prompt, np.array(row.tokens[:-1], dtype=np.int32)])
        self._stems.appendleft(Stem(row.request, ids, [row], draws=False))

    def _place_waiting(self) -> None:
        """Sequences of complete stems get slots, in order, as far as there is room."""
        rows = len(self._kv.rows())
        while self._stems and self._stems[0].complete:
            stem = self._stems[0]
            while stem.waiting:
                if rows >= self._most_rows or not self._kv.place(stem.waiting[0], stem, force=rows == 0):
                    return
                stem.waiting.pop(0)
                rows += 1
            self._kv.close(stem)
            self._stems.popleft()

    def _plan_pieces(self) -> None:
        """What to prefill in this pass, first come first served."""
        rows = len(self._kv.rows())
        budget = self._pass_tokens - rows
        for stem in self._stems:
            if not stem.complete:
                count = min(budget, len(stem.ids) - stem.done)
                if count == 0 or not self._open(stem, count, rows):
                    break
                self._pieces.append(Piece(stem, count))
                budget -= count
            rows += 0 if stem.ends_at_once else len(stem.waiting)

    def _open(self, stem: Stem, count: int, rows: int) -> bool:
        """Memory for the stem, unless it needs none; False: not now. ``rows`` are those before it in line."""
        if stem.kv is not None or (stem.ends_at_once and count == len(stem.ids)):
            return True
        idle = self._kv.used_tokens == 0
        if not idle and (rows >= self._most_rows or not self._kv.has_room_for(stem)):
            return False
        self._kv.open(stem)
        return True

    # The pass --------------------------------------------------------------------------------------------------

    def _forward(self, rows: list[Sequence]) -> Tensor:
        """Hidden states of the rows' newest tokens, then of the pieces."""
        tokens = [row.tokens[-1] for row in rows]
        positions = [row.cached for row in rows]
        runs = [(row.request.adapter, 1) for row in rows]
        for piece in self._pieces:
            start, end = piece.stem.done, piece.stem.done + piece.count
            tokens += piece.stem.ids[start:end].tolist()
            positions += range(start, end)
            runs.append((piece.stem.request.adapter, piece.count))
        device = self._base.device
        layout = SamplingLayout(self._kv.pools(), self._pieces, device)
        with self._base.routed(route(runs, device)):
            return self._base.hidden(
                torch.tensor(tokens, device=device), torch.tensor(positions, device=device), layout
            )

    def _score_prompts(self, hidden: Tensor) -> None:
        """Scores of the pieces, ``hidden``; the last position of a prompt scores nothing of it."""
        for piece, states in zip(self._pieces, torch.split(hidden, [p.count for p in self._pieces]), strict=True):
            stem, scores = piece.stem, piece.stem.request.scores
            if scores is None or not stem.draws:
                continue
            for a, b in _blocks(min(piece.count, len(stem.ids) - 1 - stem.done), self._block):
                with self._base.routed(route([(stem.request.adapter, b - a)], self._base.device)):
                    scores.write(stem.done + a, self._base.logits(states[a:b]).log_softmax(-1))

    def _advance(self, rows: list[Sequence]) -> tuple[list[Sequence], list[int]]:
        """Note what is cached now. Returns the sequences that get a token and which hidden state gives it."""
        for row in rows:
            row.cached += 1
        drawn, source = list(rows), list(range(len(rows)))
        at = len(rows)
        for piece in self._pieces:
            at += piece.count
            piece.stem.done += piece.count
            if piece.stem.complete and piece.stem.draws:
                drawn += piece.stem.waiting
                source += [at - 1] * len(piece.stem.waiting)
        return drawn, source

    def _draw(self, drawn: list[Sequence], source: list[int], hidden: Tensor) -> dict[Request, None]:
        """Each sequence takes a token. Returns the requests whose logits are not numbers."""
        broken: dict[Request, None] = {}
        for a, b in _blocks(len(drawn), self._block):
            part = drawn[a:b]
            chosen = choose(self._logits(part, source[a:b], hidden), _settings(part, self._base.device))
            for sequence, logprob in zip(part, _take(part, chosen), strict=True):
                if logprob != logprob:  # nan
                    broken[sequence.request] = None
        return broken

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

    def _account(self, rows: list[Sequence], elapsed_ns: int) -> None:
        """Divide the pass among its requests by their tokens in it."""
        tokens = len(rows) + sum(piece.count for piece in self._pieces)
        each_us = elapsed_ns / 1000 / max(1, tokens)
        for row in rows:
            row.request.compute_us += each_us
        for piece in self._pieces:
            piece.stem.request.compute_us += each_us * piece.count

    def _settle(self, drawn: list[Sequence]) -> list[Ended]:
        """Free what finished sequences hold; the requests that are complete now."""
        ended = [sequence for sequence in drawn if sequence.finished]
        for sequence in ended:
            if sequence.pool is not None:
                self._kv.remove(sequence)
        for stem in [piece.stem for piece in self._pieces if piece.stem.complete and piece.stem.draws]:
            stem.draws = False
            stem.waiting = [sequence for sequence in stem.waiting if not sequence.finished]
            if not stem.waiting and stem in self._stems:
                self._kv.close(stem)
                self._stems.remove(stem)
        return [(request, None) for request in {s.request: None for s in ended} if request.finished]

    def _drop(self, requests: Iterable[Request]) -> list[Request]:
        """Forget all that is held for these requests."""
        gone = dict.fromkeys(requests)
        if not gone:
            return []
        for row in [row for row in self._kv.rows() if row.request in gone]:
            self._kv.remove(row)
        for stem in [stem for stem in self._stems if stem.request in gone]:
            self._kv.close(stem)
            self._stems.remove(stem)
        return list(gone)


def _age(row: Sequence) -> tuple[int, int]:
    return row.request.order, row.index


def _blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of blocks of at most ``size``."""
    return ((at, min(at + size, count)) for at in range(0, count, size))


def _settings(part: list[Sequence], device: torch.device) -> Settings:
    params = [sequence.request.params for sequence in part]
    u = uniform([p.seed for p in params], [s.index for s in part], [len(s.tokens) for s in part])
    return Settings(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([p.top_k for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        u=torch.from_numpy(u).to(device),
    )


def _take(part: list[Sequence], chosen: Chosen) -> list[float]:
    """Hand each sequence its token (and, where asked for, the best K of its position). Returns the log-probs."""
    logprobs: list[float] = chosen.logprobs.tolist()
    for sequence, token, logprob in zip(part, chosen.tokens.tolist(), logprobs, strict=True):
        sequence.take(token, logprob)
    for index, sequence in enumerate(part):
        if sequence.request.topk:
            best = chosen.all_logprobs[index].topk(sequence.request.topk)
            sequence.topk_ids.append(best.indices.tolist())
            sequence.topk_logprobs.append(best.values.tolist())
    return logprobs


def _not_finite() -> Invalid:
    return Invalid("non_finite", "the weights give logits that are not finite", fix="Sample from an earlier version.")
