"""The words between scheduler and worker: a Task is a pure function of immutable arrays.

Arrays are named by digest and live in the object store; everything else a Task needs is in it. The same Task
run twice, by any worker, gives the same digests. Messages are msgpack; nothing is pickled.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import msgspec

from gradserve.wire.control import EnvSpec, EpisodeStats, PPOConfig, RolloutSpec, SpaceSpec
from gradserve.wire.data import Array, Row
from gradserve.wire.ops import AdamParams, LoraConfig, Sample, SgdParams
from gradserve.wire.results import ForwardBackwardResult, SampleResult

Digest = str
"""Hex SHA-256 of an object's bytes."""


class BaseSpec(msgspec.Struct, frozen=True):
    """A frozen model: the name that clients use and the directory (Hugging Face layout) that holds it."""

    name: str
    path: str


class WorkerSpec(msgspec.Struct, frozen=True):
    """All a worker must know to start. ``objects`` and ``durable_objects`` are the tiers of the object store.

    ``kv_cache_bytes`` bounds the sampler's cache, ``pass_tokens`` one sampling pass. GradTasks share a training pass
    up to ``merge_tokens``; one may take ``memory_bytes`` above the weights (None: no bound). ``device`` and ``dtype``
    may be "auto"; see engine/machine.py. ``numerics`` is explained in engine/kernels.py. ``max_lora_rank`` is the
    largest rank that the vllm sampler must hold; the built-in one has no bound. ``archive_url`` (with
    ``archive_options``) is where objects are fetched from that both tiers lack.
    """

    id: str
    threads: int
    bases: tuple[BaseSpec, ...]
    objects: str
    durable_objects: str
    kv_cache_bytes: int
    pass_tokens: int
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    numerics: Literal["fast", "batch_invariant"] = "fast"
    merge_tokens: int = 512
    memory_bytes: int | None = None
    sampler: Literal["builtin", "vllm"] = "builtin"
    max_lora_rank: int = 256
    archive_url: str | None = None
    archive_options: dict[str, Any] = {}


class InitTask(msgspec.Struct, frozen=True, tag="init"):
    """Fresh adapters for ``base``, or (``lora`` None) a copy of its own parameters -> ``weights``."""

    id: str
    base: str
    lora: LoraConfig | None


class GradTask(msgspec.Struct, frozen=True, tag="grad"):
    """Log-probs of ``rows`` under (base, weights); with ``backward`` also the loss's gradient -> ``gradient``.

    ``pass_rows`` are the numbers of rows of passes whose gradients are summed in order inside the worker, for weights
    that are a model's parameters: such a gradient is too large for an object per pass. Empty for adapters.
    """

    id: str
    base: str
    weights: Digest
    rows: list[Row]
    loss: str
    config: dict[str, float]
    backward: bool
    pass_rows: tuple[int, ...] = ()
    cotangents: Digest | None = None
    part: int = 0

    def passes(self) -> list[list[Row]]:
        """The rows of each pass; one pass of all rows when ``pass_rows`` is empty."""
        ends = list(itertools.accumulate(self.pass_rows or (len(self.rows),)))
        return [self.rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(row.length for row in self.rows)


class ScoreTask(msgspec.Struct, frozen=True, tag="score"):
    """What the graph ``loss`` reads of ``rows`` under (base, weights), without a gradient -> ``scores``.

    The first of the two stages of a loss over a request that is cut into several Tasks.
    """

    id: str
    base: str
    weights: Digest
    rows: list[Row]
    loss: str

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(row.length for row in self.rows)


class LossTask(msgspec.Struct, frozen=True, tag="loss"):
    """The graph ``loss`` on the scores of all parts of a request, in order -> ``cotangents``, one set for each part.

    ``rows`` are those of all parts; ``part_rows`` says how many belong to each.
    """

    id: str
    base: str
    weights: Digest
    rows: list[Row]
    part_rows: tuple[int, ...]
    loss: str
    scores: list[Digest]


class CheckTask(msgspec.Struct, frozen=True, tag="check"):
    """Resolve a stored graph and dry-run it on fake tensors. Done, or Failed ("user") with what is wrong with it."""

    id: str
    graph: Digest


class ReduceTask(msgspec.Struct, frozen=True, tag="reduce"):
    """Left fold of gradients in the order given -> ``gradient``."""

    id: str
    gradients: list[Digest]


class OptimTask(msgspec.Struct, frozen=True, tag="optim"):
    """One step (see ops.OptimStep) on the ordered sum of ``gradients`` -> ``weights``, ``moments``.

    ``moments`` is None before the first step of a run (or after a load without optimizer).
    """

    id: str
    weights: Digest
    moments: Digest | None
    gradients: list[Digest]
    adam: AdamParams
    coupled_decay: bool = False
    sgd: SgdParams | None = None


class GraphTask(msgspec.Struct, frozen=True, tag="graph"):
    """A graph of a module's parameters on ``arrays`` -> its outputs; with ``backward`` -> ``gradient`` of its loss."""

    id: str
    graph: Digest
    weights: Digest
    arrays: dict[str, Array]
    backward: bool


class RolloutTask(msgspec.Struct, frozen=True, tag="rollout"):
    """``spec.steps`` steps of the environments of one group -> ``trajectory``.

    They go on from where ``moments`` say that the run's environments are; None: from new episodes.
    """

    id: str
    graph: Digest
    weights: Digest
    moments: Digest | None
    spec: RolloutSpec
    group: int


class UpdateTask(msgspec.Struct, frozen=True, tag="update"):
    """PPO on trajectories that this policy made -> ``weights``, ``moments`` (the environments' states too).

    Actions are of ``space``, or of the environment ``env``.
    """

    id: str
    graph: Digest
    weights: Digest
    moments: Digest | None
    trajectories: list[Digest]
    space: SpaceSpec | None
    env: EnvSpec | None
    config: PPOConfig
    seed: int


class EvaluateTask(msgspec.Struct, frozen=True, tag="evaluate"):
    """Whole episodes -> their returns and lengths."""

    id: str
    graph: Digest
    weights: Digest
    env: EnvSpec
    episodes: int
    seed: int
    deterministic: bool
    normalise_observations: bool
    clip_observation: float


class SampleTask(msgspec.Struct, frozen=True, tag="sample"):
    """All samples of one request; batched in the worker with whatever else is running there.

    With ``stream`` the tokens are also sent as they come (Progress).
    """

    id: str
    op: Sample
    stream: bool = False


ModuleTask = GraphTask | RolloutTask | UpdateTask | EvaluateTask
Task = InitTask | GradTask | ScoreTask | LossTask | CheckTask | ReduceTask | OptimTask | SampleTask | ModuleTask


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
    env_steps: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.train_tokens + other.train_tokens,
            self.prefill_tokens + other.prefill_tokens,
            self.cached_tokens + other.cached_tokens,
            self.sample_tokens + other.sample_tokens,
            self.compute_us + other.compute_us,
            self.env_steps + other.env_steps,
        )


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A Task's outcome. ``objects`` maps what it made ("weights", "moments", "gradient" ...) to digests of objects."""

    task_id: str
    usage: Usage
    objects: dict[str, Digest] = {}
    rows: ForwardBackwardResult | None = None
    sample: SampleResult | None = None
    metrics: dict[str, float] = {}
    outputs: dict[str, Array] = {}
    episodes: EpisodeStats | None = None


FailureKind = Literal["user", "too_large", "out_of_memory", "corrupt", "mismatch", "cancelled", "internal"]
"""What went wrong: the caller's request; what it would take is more than there
is; memory ran out; an object whose bytes are not what its name says; an object that was
computed from other weights than the Task's; nothing, it was told to stop; anything else."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The Task raised, or was refused as too large before it was computed. The worker is still alive.

    ``peak_rss_bytes`` is the worker's high-water mark so far, ``index`` the row that is at fault, where one is.
    """

    task_id: str
    kind: FailureKind
    message: str
    traceback: str = ""
    peak_rss_bytes: int = 0
    index: int | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Forget a SampleTask. Answered by its outcome, Failed ("cancelled"); not at all when it had ended before."""

    task_id: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """New tokens of sequence ``index`` of a streamed SampleTask: int32 [n], with float32 log-probs [n]."""

    task_id: str
    index: int
    tokens: bytes
    logprobs: bytes


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered at once by the worker's reader thread, whatever is being computed."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """``peak_rss_bytes`` is the worker's high-water mark."""

    peak_rss_bytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker's first message."""

    pid: int


class LastWords(msgspec.Struct, frozen=True, tag="last_words"):
    """The worker cannot start or go on, and ends: its exception in one line."""

    message: str


ToWorker = Task | Cancel | Ping
FromWorker = Done | Failed | Progress | Pong | Ready | LastWords
Outcome = Done | Failed
