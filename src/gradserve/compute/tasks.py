"""The words between scheduler and worker: a Task is a pure function of immutable arrays.

Arrays are named by digest and live in the object store; everything else a Task needs is in it. The same Task
run twice, by any worker, gives the same digests. Messages are msgpack; nothing is pickled.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gradserve.wire.data import Row
from gradserve.wire.ops import AdamParams, LoraConfig, Sample
from gradserve.wire.results import ForwardBackwardResult, SampleResult

Digest = str
"""Hex SHA-256 of an object's bytes."""


class BaseSpec(msgspec.Struct, frozen=True):
    """A frozen model: the name that clients use and the directory (Hugging Face layout) that holds it."""

    name: str
    path: str


class WorkerSpec(msgspec.Struct, frozen=True):
    """All a worker must know to start. ``objects`` and ``durable_objects`` are the tiers of the object store.

    ``kv_cache_bytes`` bounds the sampler's cache, ``pass_tokens`` one pass. ``max_lora_rank`` is the largest rank that
    the vllm sampler must hold; the built-in one has no bound.
    """

    id: str
    threads: int
    bases: tuple[BaseSpec, ...]
    objects: str
    durable_objects: str
    kv_cache_bytes: int
    pass_tokens: int
    sampler: Literal["builtin", "vllm"] = "builtin"
    max_lora_rank: int = 256


class InitTask(msgspec.Struct, frozen=True, tag="init"):
    """Fresh adapters for ``base`` -> ``weights``."""

    id: str
    base: str
    lora: LoraConfig


class GradTask(msgspec.Struct, frozen=True, tag="grad"):
    """Log-probs of ``rows`` under (base, weights); with ``backward`` also the loss's gradient -> ``gradient``."""

    id: str
    base: str
    weights: Digest
    rows: list[Row]
    loss: str
    config: dict[str, float]
    backward: bool


class ReduceTask(msgspec.Struct, frozen=True, tag="reduce"):
    """Left fold of gradients in the order given -> ``gradient``."""

    id: str
    gradients: list[Digest]


class OptimTask(msgspec.Struct, frozen=True, tag="optim"):
    """One AdamW step on the ordered sum of ``gradients`` -> ``weights``, ``moments``.

    ``moments`` is None before the first step of a run (or after a load without optimizer).
    """

    id: str
    weights: Digest
    moments: Digest | None
    gradients: list[Digest]
    adam: AdamParams


class SampleTask(msgspec.Struct, frozen=True, tag="sample"):
    """All samples of one request; batched in the worker with whatever else is running there.

    With ``stream`` the tokens are also sent as they come (Progress).
    """

    id: str
    op: Sample
    stream: bool = False


Task = InitTask | GradTask | ReduceTask | OptimTask | SampleTask


class Usage(msgspec.Struct, frozen=True):
    """What a Task consumed. Tokens are counted as computed: a prompt shared by n samples is prefilled once.

    ``compute_us`` is the worker's wall time in whole microseconds; a pass shared by several tasks is divided
    between them by their tokens in it.
    """

    train_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    sample_tokens: int = 0
    compute_us: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.train_tokens + other.train_tokens,
            self.prefill_tokens + other.prefill_tokens,
            self.cached_tokens + other.cached_tokens,
            self.sample_tokens + other.sample_tokens,
            self.compute_us + other.compute_us,
        )


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A Task's outcome. ``objects`` maps "weights" | "moments" | "gradient" to digests now in the object store."""

    task_id: str
    usage: Usage
    objects: dict[str, Digest] = {}
    rows: ForwardBackwardResult | None = None
    sample: SampleResult | None = None
    metrics: dict[str, float] = {}


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """New ``tokens`` (int32) and ``logprobs`` (float32) of sample ``index`` of a streamed Task, before its Done."""

    task_id: str
    index: int
    tokens: bytes
    logprobs: bytes


FailureKind = Literal["user", "out_of_memory", "internal", "cancelled"]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The Task raised. The worker is still alive. ``peak_rss_bytes`` is the worker's high-water mark so far."""

    task_id: str
    kind: FailureKind
    message: str
    traceback: str = ""
    peak_rss_bytes: int = 0


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered at once by the worker's reader thread, whatever is being computed."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """``peak_rss_bytes`` is the worker's high-water mark."""

    peak_rss_bytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker's first message."""

    pid: int


ToWorker = Task | Ping
FromWorker = Done | Failed | Progress | Pong | Ready
Outcome = Done | Failed
