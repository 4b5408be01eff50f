"""SampleTasks -> Outcomes through vLLM, under the conventions of sampler.Sampler with two exceptions: a seed's sample
is another one than the built-in sampler's, and what shares a pass may change a log-prob in its last digits.

The way of a Task: its adapter is loaded; a probe runs in vLLM's passes like any other sequence and gives the
fingerprint; only when that is accepted do the Task's own sequences start. Scores of the prompt are not asked of vLLM,
which fails on them when an adapter is on lm_head and requests share a pass; the trainer's code computes them.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import torch

from gradserve.compute.engine import fingerprint
from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.attention import PackedLayout
from gradserve.compute.engine.base import Base, Bases
from gradserve.compute.engine.engine import failure
from gradserve.compute.engine.fingerprint import Fingerprint
from gradserve.compute.engine.logprobs import log_softmax_
from gradserve.compute.engine.lora import Adapter, route
from gradserve.compute.engine.memory_plan import CHUNK
from gradserve.compute.engine.sampler import request_of
from gradserve.compute.engine.sequences import Request, Sequence
from gradserve.compute.engine.vllm_adapters import Adapters, Loaded
from gradserve.compute.engine.vllm_engine import Drawn, Job, SamplingEngine, Token
from gradserve.compute.tasks import Done, Failed, Outcome, Progress, SampleTask
from gradserve.wire.errors import Invalid, Unsupported
from gradserve.wire.ops import SamplingParams

_CURE = "Sample from an earlier version."

COOLEST, HOTTEST = 0.01, 2.0
"""Temperatures between which vLLM does as told: lower ones but 0 it would raise to 0.01, higher ones it refuses."""


@dataclass(eq=False)
class _Held:
    """A request and the adapter that it keeps loaded."""

    request: Request
    loaded: Loaded


@dataclass(eq=False)
class _Probe:
    """The fingerprint of ``loaded`` in the making, and the requests that wait for it."""

    loaded: Loaded
    waiting: list[_Held] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)


class VllmSampler:
    """``add`` Tasks at any time and call ``step`` while ``busy``; neither raises, a failure is an Outcome.

    All Tasks are for the base named ``base``; ``start`` makes an engine for it when the first one comes. Adapters are
    written below ``folders``, which is emptied then. ``tell`` hears the fingerprint of each new set of weights.
    """

    def __init__(
        self,
        base: str,
        bases: Bases,
        arrays: Arrays,
        start: Callable[[Base], SamplingEngine],
        folders: Path,
        max_rank: int,
        tell: Callable[[str], None],
    ) -> None:
        self._name = base
        self._bases = bases
        self._arrays = arrays
        self._start = start
        self._folders = folders
        self._max_rank = max_rank
        self._tell = tell
        self._count = 0
        self._probes: dict[str, _Probe] = {}
        self._running: dict[str, tuple[_Held, Sequence]] = {}
        self._messages: list[Outcome | Progress] = []
        self._uncharged_us = 0.0

    @property
    def _base(self) -> Base:
        return self._bases.get(self._name)

    @cached_property
    def _engine(self) -> SamplingEngine:
        return self._start(self._base)

    @cached_property
    def _adapters(self) -> Adapters:
        return Adapters(self._engine, self._arrays, self._base, self._folders, self._max_rank)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._messages or self._probes or self._running)

    def add(self, task: SampleTask) -> None:
        """Queue a Task; one that cannot be run fails at the next step."""
        try:
            held = self._hold(task)
        except Exception as error:
            self._messages.append(failure(task.id, error))
            return
        try:
            self._admit(held)
        except Exception as error:
            self._fail(held, error)

    def cancel(self, task_id: str) -> Outcome | None:
        """Drop a Task and free what it holds; its outcome, or None if it is not (or no longer) here."""
        waiting = [held for probe in self._probes.values() for held in probe.waiting]
        for held in [*waiting, *(held for held, _ in self._running.values())]:
            if held.request.task_id == task_id:
                self._drop(held)
                return Failed(task_id, "cancelled", "the sample was cancelled")
        return None

    def step(self) -> list[Outcome | Progress]:
        """One pass of vLLM. A streamed Task's Progress comes before its outcome."""
        if self._probes or self._running:
            try:
                self._pass()
            except Exception as error:
                self._abandon(error)
        messages, self._messages = self._messages, []
        return messages

    # From Task to sequences ------------------------------------------------------------------------------------

    def _hold(self, task: SampleTask) -> _Held:
        base = self._bases.get(task.op.base)
        _refuse_unserved(task.op.params)
        weights = task.op.weights
        adapter = None if weights is None else Adapter.of(self._arrays.get(weights))
        self._count += 1
        request = request_of(task, base, self._count, adapter)
        if len(request.prompt) == base.context:
            raise Invalid("too_long", f"the prompt fills the context of {base.context} tokens", field="prompt")
        return _Held(request, self._adapters.hold(weights))

    def _admit(self, held: _Held) -> None:
        """Start a request, or let it wait for its adapter's fingerprint."""
        loaded = held.loaded
        if loaded.fingerprint is not None:
            self._begin(held)
            return
        key = f"probe-{loaded.adapter.number}"
        if key not in self._probes:
            self._engine.submit(_probe_job(key, loaded, self._base.vocab))
            self._adapters.hold_again(loaded)
            self._probes[key] = _Probe(loaded)
        self._probes[key].waiting.append(held)

    def _begin(self, held: _Held) -> None:
        request = held.request
        try:
            if request.scores is not None:
                started = time.perf_counter_ns()
                _score_prompt(self._base, request)
                request.compute_us += (time.perf_counter_ns() - started) / 1000
            prompt = request.prompt.tolist()
            for sequence in request.sequences:
                key = f"{request.task_id}#{sequence.index}"
                seed = stream_seed(request.params.seed, sequence.index)
                adapter = held.loaded.adapter
                self._engine.submit(Job(key, prompt, adapter, request.params, seed, request.limit, request.topk))
                self._running[key] = held, sequence
        except Exception as error:
            self._fail(held, error)

    # A pass ----------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        started = time.perf_counter_ns()
        drawn = list(self._engine.step())
        self._charge(drawn, (time.perf_counter_ns() - started) / 1000)
        for part in drawn:
            if part.key in self._probes:
                self._advance_probe(part)
            elif part.key in self._running:  # else its request has failed in this pass
                self._advance(part)

    def _charge(self, drawn: list[Drawn], elapsed_us: float) -> None:
        """Divide a pass by tokens. Passes that only prefill name nobody; the next one that does carries them."""
        self._uncharged_us += elapsed_us
        shares: list[tuple[Request | None, int]] = []
        for part in drawn:
            if part.key in self._running:
                held, sequence = self._running[part.key]
                prefilled = 0 if sequence.tokens else len(held.request.prompt) - part.cached
                shares.append((held.request, prefilled + len(part.tokens)))
            else:
                shares.append((None, len(part.tokens)))
        total = sum(count for _, count in shares)
        if not total:
            return
        for request, count in shares:
            if request is not None:
                request.compute_us += self._uncharged_us * count / total
        self._uncharged_us = 0.0

    def _advance(self, part: Drawn) -> None:
        held, sequence = self._running[part.key]
        if held.request.cached_tokens is None:
            held.request.cached_tokens = part.cached
        try:
            self._take(sequence, part)
        except Exception as error:
            self._fail(held, error)
            return
        if not sequence.finished:
            return
        del self._running[part.key]
        if not part.ended:
            self._engine.abort([part.key])  # a stop string: vLLM doesn't know of it
        if held.request.finished:
            self._adapters.release(held.loaded)
            self._messages.append(_done(held))

    def _take(self, sequence: Sequence, part: Drawn) -> None:
        request = sequence.request
        for token in part.tokens:
            if not math.isfinite(token.logprob):
                raise Invalid("non_finite", "the weights give logits that are not finite", fix=_CURE)
            sequence.take(token.id, token.logprob)
            if request.topk:
                sequence.topk_ids.append([id for id, _ in token.best[: request.topk]])
                sequence.topk_logprobs.append([logprob for _, logprob in token.best[: request.topk]])
            if request.stream:
                self._messages.append(sequence.progress())
            if sequence.finished:
                return
        if part.ended:
            raise RuntimeError("vLLM ended a sequence before its limit")

    def _advance_probe(self, part: Drawn) -> None:
        probe = self._probes[part.key]
        probe.tokens += part.tokens
        if not part.ended:
            return
        del self._probes[part.key]
        try:
            probe.loaded.fingerprint = self._judge(probe)
        except Exception as error:
            for held in probe.waiting:
                self._fail(held, error)
        else:
            for held in probe.waiting:
                self._begin(held)
        finally:
            self._adapters.release(probe.loaded)

    def _judge(self, probe: _Probe) -> Fingerprint:
        """Raises Invalid when vLLM doesn't compute what the trainer computes."""
        name = probe.loaded.adapter.name
        best = _best(self._base.vocab)
        found = fingerprint.compare(
            self._base,
            self._adapters.weights(name),
            [token.id for token in probe.tokens],
            [token.best[:best] for token in probe.tokens],
        )
        self._tell(f"vLLM, weights {name[:12]}: log-probs differ from the trainer's by {found}")
        if not found.accepted:
            raise Invalid(
                "fingerprint",
                f"vLLM's log-probs under the weights {name[:12]} differ from the trainer's by {found}; nothing is "
                "sampled from them.",
                fix="Set sampler to builtin.",
            )
        return found

    # Ends ------------------------------------------------------------------------------------------------------

    def _fail(self, held: _Held, error: Exception) -> None:
        self._drop(held)
        self._messages.append(failure(held.request.task_id, error))

    def _drop(self, held: _Held) -> None:
        for probe in self._probes.values():
            if held in probe.waiting:
                probe.waiting.remove(held)
        keys = [key for key, (other, _) in self._running.items() if other is held]
        for key in keys:
            del self._running[key]
        self._engine.abort(keys)
        self._adapters.release(held.loaded)

    def _abandon(self, error: Exception) -> None:
        """vLLM raised: what it holds is unknown, so all that was with it fails and the next Task starts another."""
        waiting = [held for probe in self._probes.values() for held in probe.waiting]
        held = dict.fromkeys([*waiting, *(held for held, _ in self._running.values())])
        self._messages += [failure(one.request.task_id, error) for one in held]
        self._probes, self._running = {}, {}
        del self._adapters, self._engine


def _probe_job(key: str, loaded: Loaded, vocab: int) -> Job:
    """Drawn at temperature 1: the most probable tokens alone would say little."""
    params = SamplingParams(max_tokens=fingerprint.DRAWN_TOKENS, seed=0)
    prompt = fingerprint.probe(vocab).tolist()
    return Job(key, prompt, loaded.adapter, params, params.seed, params.max_tokens, _best(vocab))


def _best(vocab: int) -> int:
    return min(fingerprint.BEST, vocab)


def _done(held: _Held) -> Done:
    """The outcome of a finished request, with the difference that its samples come with."""
    found = held.loaded.fingerprint
    assert found is not None
    metrics = {"sampler_trainer_diff:max": found.worst, "sampler_trainer_diff:mean": found.mean}
    return msgspec.structs.replace(held.request.done(), metrics=metrics)


@torch.no_grad()
def _score_prompt(base: Base, request: Request) -> None:
    assert request.scores is not None
    length = len(request.prompt)
    if length == 1:
        return  # the first token has no score
    tokens = torch.from_numpy(request.prompt.astype("int64")).to(base.device)
    with base.routed(route([(request.adapter, length)], base.device)):
        hidden = base.hidden(tokens, torch.arange(length, device=base.device), PackedLayout([length], base.kernels))
    at = 0
    for part in torch.split(hidden[: length - 1], CHUNK):
        with base.routed(route([(request.adapter, len(part))], base.device)):
            request.scores.write(at, log_softmax_(base.logits(part)))
        at += len(part)


def stream_seed(seed: int, sample: int) -> int:
    """vLLM's seed for a sample of a request: the streams of neighbours have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample}".encode()).digest()[:8], "little") >> 1


def _refuse_unserved(params: SamplingParams) -> None:
    if 0 < params.temperature < COOLEST or params.temperature > HOTTEST:
        raise Unsupported(
            "unsupported.temperature",
            f"the temperature is {params.temperature}; vLLM takes 0 and {COOLEST} to {HOTTEST}.",
            field="temperature",
        )


def say(text: str) -> None:
    """To the server's terminal; a worker shares it."""
    print(f"gradserve: {text}", file=sys.stderr, flush=True)
