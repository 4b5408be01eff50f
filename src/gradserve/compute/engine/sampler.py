"""SampleTasks -> Outcomes: lanes of continuous batching, taken in turn.

Each base has a lane for itself and all its adapters. A version of a fully trained run shares no pass with anything
else: it has a lane of its own while it has requests, and what that lane held goes when it has none.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np

from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.base import Base, Bases
from gradserve.compute.engine.engine import failure
from gradserve.compute.engine.lane import Lane
from gradserve.compute.engine.lora import Adapter, Tensors
from gradserve.compute.engine.parameters import is_full
from gradserve.compute.engine.prompts import PromptScores
from gradserve.compute.engine.sequences import Request, Sequence
from gradserve.compute.engine.stops import TextStops
from gradserve.compute.tasks import Failed, Outcome, Progress, SampleTask
from gradserve.wire.errors import Invalid
from gradserve.wire.ops import Sample

FULL_LANE_SHARE = 8
"""The cache of a version of a fully trained run is bounded by this part of a base's: several may be open at a time."""

_AT = "@"
"""A lane's key is its base's name, or <name>@<digest of the parameters>; no name has this letter."""


class Sampler:
    """``add`` Tasks at any time and call ``step`` while ``busy``; neither raises, a failure is an Outcome.

    ``kv_cache_bytes`` bounds the cache of each base, ``pass_tokens`` one pass.
    """

    def __init__(self, bases: Bases, arrays: Arrays, kv_cache_bytes: int, pass_tokens: int) -> None:
        self._bases = bases
        self._arrays = arrays
        self._kv_cache_bytes = kv_cache_bytes
        self._pass_tokens = pass_tokens
        self._lanes: dict[str, Lane] = {}
        self._adapters: WeakValueDictionary[str, Adapter] = WeakValueDictionary()
        self._running: dict[str, tuple[Lane, Request]] = {}
        self._refused: list[Outcome] = []
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._refused) or any(lane.busy for lane in self._lanes.values())

    def add(self, task: SampleTask) -> None:
        """Queue a Task; one that cannot be run fails at the next step."""
        try:
            base = self._bases.get(task.op.base)
            full = self._full_parameters(task.op, base)
            self._count += 1
            adapter = self._adapter(task.op.weights) if full is None and task.op.weights is not None else None
            request = request_of(task, base, self._count, adapter)
            lane = self._lane(base, task.op, full)
            lane.add(request)
            self._running[task.id] = lane, request
        except Exception as error:
            self._refused.append(failure(task.id, error))

    def cancel(self, task_id: str) -> Outcome | None:
        """Drop a Task and free what it holds; its outcome, or None if it is not (or no longer) here."""
        if task_id not in self._running:
            return None
        lane, request = self._running.pop(task_id)
        lane.cancel(request)
        self._close_idle()
        return Failed(task_id, "cancelled", "the sample was cancelled")

    def step(self) -> list[Outcome | Progress]:
        """One pass of the lane whose turn it is. A streamed Task's Progress comes before its outcome."""
        messages: list[Outcome | Progress] = [*self._refused]
        self._refused = []
        for key, lane in self._lanes.items():
            if lane.busy:
                self._lanes[key] = self._lanes.pop(key)  # to the end of the line
                passed = lane.step()
                messages += [sequence.progress() for sequence in passed.drawn if sequence.request.stream]
                messages += [self._outcome(*ended) for ended in passed.ended]
                break
        self._close_idle()
        return messages

    def _full_parameters(self, op: Sample, base: Base) -> Tensors | None:
        """The parameters to sample with, if the weights are such and not an adapter."""
        if op.weights is None or op.weights in self._adapters:
            return None
        weights = self._arrays.get(op.weights)
        if not is_full(weights):
            return None
        base.parameters.check(weights)
        return weights

    def _lane(self, base: Base, op: Sample, full: Tensors | None) -> Lane:
        key = op.base if full is None else f"{op.base}{_AT}{op.weights}"
        if key not in self._lanes:
            cache = self._kv_cache_bytes if full is None else self._kv_cache_bytes // FULL_LANE_SHARE
            self._lanes[key] = Lane(base, cache, self._pass_tokens, full)
        return self._lanes[key]

    def _close_idle(self) -> None:
        for key, lane in list(self._lanes.items()):
            if _AT in key and not lane.busy:
                del self._lanes[key]

    def _outcome(self, request: Request, error: Exception | None) -> Outcome:
        del self._running[request.task_id]
        return request.done() if error is None else failure(request.task_id, error)

    def _adapter(self, digest: str) -> Adapter:
        """One object per digest while it is in use: the rows of a pass are routed by identity."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            adapter = self._adapters[digest] = Adapter.of(self._arrays.get(digest))
        return adapter


def request_of(task: SampleTask, base: Base, order: int, adapter: Adapter | None) -> Request:
    """The ``order``-th request of a worker, with its sequences. Raises Invalid for one that can't be run."""
    op = task.op
    prompt = np.frombuffer(op.prompt, dtype="<i4")
    _check(op, prompt, base)
    request = Request(
        task_id=task.id,
        order=order,
        weights=op.weights,
        adapter=adapter,
        prompt=prompt,
        params=op.params,
        limit=max(1, min(op.params.max_tokens, base.context - len(prompt))),
        topk=min(op.topk_sample_logprobs, base.vocab),
        scores=PromptScores(op, prompt, base.vocab) if PromptScores.wanted(op) else None,
        version=op.version,
        stream=task.stream,
    )
    strings = tuple(string for string in op.params.stop_strings if string)
    for index in range(op.num_samples):
        text = TextStops(base.tokenizer, strings) if strings else None
        request.sequences.append(Sequence(request, index, text))
    return request


def _check(op: Sample, prompt: np.ndarray[tuple[int], np.dtype[np.int32]], base: Base) -> None:
    if not len(prompt):
        raise Invalid("empty_prompt", "the prompt has no tokens", field="prompt")
    if len(prompt) > base.context:
        raise Invalid("too_long", f"the prompt has {len(prompt)} tokens; the context is {base.context}", field="prompt")
    if int(prompt.min()) < 0 or int(prompt.max()) >= base.vocab:
        raise Invalid("unknown_token", f"the prompt has ids outside 0..{base.vocab - 1}", field="prompt")
    if op.num_samples < 1 or op.params.max_tokens < 1:
        raise Invalid("bad_count", "num_samples and max_tokens are at least 1", field="num_samples")
