"""What the sampler holds for a request: its sequences, and the stems they grow from. No torch decisions here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gradserve.compute.engine.prefix import BLOCK, chain
from gradserve.compute.engine.stops import TextStops
from gradserve.compute.tasks import Done, Progress, Usage
from gradserve.wire.data import Array, as_tokens
from gradserve.wire.ops import SamplingParams
from gradserve.wire.results import SampledSequence, SampleResult, TopK

if TYPE_CHECKING:
    from torch import Tensor

    from gradserve.compute.engine.kv import Pool
    from gradserve.compute.engine.lora import Adapter
    from gradserve.compute.engine.prompts import PromptScores


@dataclass(eq=False)
class Request:
    """One SampleTask. ``order`` counts requests as they came; ``limit`` is the most tokens a sequence may get.

    ``weights`` is the adapter's digest. ``cached_tokens`` are those of the prompt that were found in the prefix cache
    when it was first begun: None before that.
    """

    task_id: str
    order: int
    weights: str | None
    adapter: Adapter | None
    prompt: NDArray[np.int32]
    params: SamplingParams
    limit: int
    topk: int
    scores: PromptScores | None
    stream: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int | None = None
    compute_us: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether all sequences are."""
        return all(sequence.finished for sequence in self.sequences)

    def done(self) -> Done:
        """The outcome of a finished request. What had to be computed again after an eviction is not charged again."""
        cached_tokens = self.cached_tokens or 0
        usage = Usage(
            prefill_tokens=len(self.prompt) - cached_tokens,
            cached_tokens=cached_tokens,
            sample_tokens=sum(len(sequence.tokens) for sequence in self.sequences),
            compute_us=round(self.compute_us),
        )
        scores = self.scores
        result = SampleResult(
            sequences=[sequence.result() for sequence in self.sequences],
            prompt_logprobs=None if scores is None else scores.logprobs_bytes(),
            topk_prompt=None if scores is None else scores.topk(),
            target_prompt_logprobs=None if scores is None else scores.targets(),
            cached_prompt_tokens=cached_tokens,
        )
        return Done(self.task_id, usage, sample=result)


@dataclass(eq=False)
class Sequence:
    """One continuation. While it decodes it lies in ``slot`` of ``pool``, which holds its first ``cached`` tokens."""

    request: Request
    index: int
    text: TextStops | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_logprobs: list[list[float]] = field(default_factory=list)
    finished: bool = False
    stopped: bool = False
    pool: Pool | None = None
    slot: int = 0
    cached: int = 0

    @property
    def age(self) -> tuple[int, int]:
        """Sorts sequences and stems, oldest first."""
        return self.request.order, self.index

    def progress(self) -> Progress:
        """Its newest token, in the words of a stream."""
        token, logprob = self.tokens[-1:], np.array(self.logprobs[-1:], dtype="<f4").tobytes()
        return Progress(self.request.task_id, self.index, as_tokens(token), logprob)

    def take(self, token: int, logprob: float) -> None:
        """Append a token and see whether it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = token in self.request.params.stop_tokens or (
            self.text is not None and self.text.found(self.tokens)
        )
        self.finished = self.stopped or len(self.tokens) >= self.request.limit

    def result(self) -> SampledSequence:
        """In the words of the wire."""
        logprobs = np.array(self.logprobs, dtype="<f4").tobytes()
        return SampledSequence(as_tokens(self.tokens), logprobs, self.stopped, self._topk())

    def _topk(self) -> TopK | None:
        if not self.request.topk:
            return None
        ids = np.array(self.topk_ids, dtype=np.int32)
        return TopK(Array.of(ids), Array.of(np.array(self.topk_logprobs, dtype=np.float32)))


@dataclass(eq=False)
class Stem:
    """Tokens to prefill once for the sequences that ``waiting`` lists; ``kv`` [L, 2, Hkv, P, D] holds ``done`` of them.

    ``names`` are those of its full blocks in the prefix cache.
    ``draws``: its end gives each waiting sequence its first token. A stem made again after its cache was taken
    away doesn't draw, as its sequences already have tokens; their last one is decoded next.
    """

    request: Request
    ids: NDArray[np.int32]
    waiting: list[Sequence]
    draws: bool
    done: int = 0
    kv: Tensor | None = None
    names: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.names = chain(self.request.weights, self.ids)

    @property
    def age(self) -> tuple[int, int]:
        """Sorts sequences and stems, oldest first."""
        return self.waiting[0].age

    @property
    def readable(self) -> list[bytes]:
        """Blocks that may come from the cache: the last token and those that score have to be computed."""
        scores = self.request.scores if self.draws else None
        needed = len(self.ids) - 1 if scores is None else min(len(self.ids) - 1, scores.first)
        return self.names[: needed // BLOCK]

    @property
    def complete(self) -> bool:
        """Whether all of it has been computed."""
        return self.done == len(self.ids)

    @property
    def ends_at_once(self) -> bool:
        """Whether nothing can follow the token it draws, so that its keys and values are of no use afterwards."""
        return self.draws and self.request.limit == 1
