"""What the rest of gradserve may ask of the store.

Invariants, each with a test in tests/contract:

1. An Op's identity (run or sampling session, seq) is written once; sending the same body again returns the same
   Op, another body under the same identity is refused.
2. An Op is settled once. Result, new version, checkpoint and ledger line are one transaction; a second settlement
   writes nothing.
3. Everything is reached through a tenant: another tenant's rows are as if they did not exist.
4. What was returned to a caller is on disk (unless the store lives in memory).
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from gradserve.wire.errors import Problem
from gradserve.wire.identity import BaseIdentity
from gradserve.wire.ops import LoraConfig, OpKind, module_graph

AGE_RECIPIENTS = "gradserve.age_recipients"
"""In the user metadata of external weights, which no request sets: the store, not a folder, must know that a file may
only go out encrypted. One recipient a line; public keys are no secrets."""

OpState = Literal["accepted", "done", "failed", "rejected", "expired"]


class Session(msgspec.Struct, frozen=True):
    """One client's connection. Times are seconds since the epoch, UTC."""

    id: str
    tenant: str
    created_at: float
    last_seen_at: float
    display_name: str | None = None
    project_id: str | None = None
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = {}
    finished: Literal["success", "errored", "interrupted"] | None = None
    finish_detail: str | None = None


class Run(msgspec.Struct, frozen=True):
    """A set of trainable weights as it stands.

    ``lora`` None means that all parameters of the base are trained (docs/decisions/0009).
    ``version`` counts optimizer steps and loads. ``gradients`` are (seq, digest) pairs that wait for the next
    optimizer step. ``cursor`` is the highest seq such that it and all lower ones are ended (-1: not even created).
    """

    id: str
    tenant: str
    session_id: str
    base: str
    lora: LoraConfig | None
    created_at: float
    last_request_at: float
    user_metadata: dict[str, str] = {}
    version: int = 0
    weights: str | None = None
    moments: str | None = None
    gradients: tuple[tuple[int, str], ...] = ()
    cursor: int = -1
    corrupted: bool = False
    parent: str | None = None
    client_state: str | None = None

    @property
    def graph(self) -> str | None:
        """Of a run that trains a module: the digest of its forward graph."""
        return module_graph(self.base)

    @property
    def trained_on(self) -> BaseIdentity | None:
        """The files that were its base model when it was created; None for modules, and where it was not noted."""
        return BaseIdentity.of_metadata(self.user_metadata)


class SamplingSession(msgspec.Struct, frozen=True):
    """A frozen pair of base and adapter to sample from. ``weights`` None means the base alone."""

    id: str
    tenant: str
    session_id: str
    base: str
    created_at: float
    weights: str | None = None
    run_id: str | None = None
    run_version: int | None = None
    model_path: str | None = None
    clones: int = 0


class Checkpoint(msgspec.Struct, frozen=True):
    """A name on a durable version. ``kind`` and ``name`` are the last two parts of its tinker:// path.

    ``lora`` None means that ``weights`` are all parameters of the base, not an adapter.
    """

    run_id: str
    tenant: str
    kind: Literal["weights", "sampler_weights", "external_weights"]
    name: str
    base: str
    lora: LoraConfig | None
    version: int
    weights: str
    moments: str | None
    size_bytes: int
    created_at: float
    expires_at: float | None = None
    public: bool = False
    user_metadata: dict[str, str] = {}
    client_state: str | None = None

    @property
    def path(self) -> str:
        """tinker://<run>/<kind>/<name>"""
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    @property
    def age_recipients(self) -> list[str]:
        """To whom its files must be encrypted before they leave the server; [] when they go out as they are."""
        if self.kind != "external_weights":
            return []
        return self.user_metadata.get(AGE_RECIPIENTS, "").splitlines()


class Op(msgspec.Struct, frozen=True):
    """A journal entry. ``scope`` is the run id or the sampling session id; (scope, seq) is unique.

    ``run_id`` is the run that is billed: the scope of a training Op; for a sample the run whose weights its session
    holds (None for the base alone). ``body`` is wire.ops msgpack, emptied when the result expires. ``result`` is what
    retrieve_future answers, in ``content_type``; one that was computed with a run's weights says with which, by
    ``weights`` (digest) and ``version``. A failed or rejected Op carries ``problem`` instead.
    """

    id: str
    tenant: str
    session_id: str
    scope: str
    seq: int
    kind: OpKind
    body: bytes
    accepted_at: float
    run_id: str | None = None
    price_version: str = ""
    state: OpState = "accepted"
    ended_at: float | None = None
    result: bytes | None = None
    content_type: str | None = None
    problem: Problem | None = None
    weights: str | None = None
    version: int | None = None


class LedgerLine(msgspec.Struct, frozen=True):
    """What one executed Op cost: append-only, exact. ``id`` is derived from the Op, so a replay writes nothing new.

    Amount is USD = (train*train_price + prefill*prefill_price + ...)/1e6 + compute price, as the price sheet
    ``price_version`` had it when the Op was accepted.
    """

    id: str
    op_id: str
    tenant: str
    kind: OpKind
    base: str
    run_id: str | None
    session_id: str
    seq: int
    train_tokens: int
    prefill_tokens: int
    cached_tokens: int
    sample_tokens: int
    compute_ms: Decimal
    amount_usd: Decimal
    price_version: str
    at: float
    env_steps: int = 0


class LedgerTotal(msgspec.Struct, frozen=True):
    """The sum of some ledger lines."""

    lines: int
    train_tokens: int
    prefill_tokens: int
    cached_tokens: int
    sample_tokens: int
    compute_ms: Decimal
    amount_usd: Decimal
    env_steps: int = 0


VersionCause = Literal["steps", "age", "replay", "save", "load", "rollback", "recovery"]


class Version(msgspec.Struct, frozen=True):
    """A state of a run that survives power loss: what the run was after the Op at ``seq``, between two optimizer steps.

    ``version`` counts optimizer steps. Its arrays are in the durable tier; ``manifest`` (JSON, see
    docs/reference/durability.md) names everything that a resume needs, each thing with its digest. A replay starts at
    the newest one that is whole. It never starts before one of cause "load", "rollback" or "recovery": these changed
    the run by something that is not in the journal's bodies.
    """

    run_id: str
    tenant: str
    version: int
    seq: int
    weights: str
    moments: str | None
    cause: VersionCause
    size_bytes: int
    created_at: float
    manifest: str = "{}"


EventKind = Literal[
    "worker_lost",
    "recovered",
    "recovered_differently",
    "weights_lost",
    "loaded",
    "rolled_back",
    "forked",
    "checkpoint_expires",
    "checkpoint_expired",
    "storage_alarm",
    "storage_well",
    "restored",
    "base_differs",
]


class StoredGraph(msgspec.Struct, frozen=True):
    """A checked graph of a tenant's; the object ``digest`` is the graph."""

    tenant: str
    digest: str
    name: str
    size_bytes: int
    created_at: float


class Event(msgspec.Struct, frozen=True):
    """Something that happened to a run, or (``run_id`` None) to the server, in one line for people."""

    at: float
    kind: EventKind
    detail: str
    tenant: str | None = None
    run_id: str | None = None
    seq: int | None = None


class Metrics(msgspec.Struct, frozen=True):
    """What one Op of a run measured. ``version`` is the run's after the Op."""

    run_id: str
    tenant: str
    seq: int
    version: int
    kind: OpKind
    at: float
    values: dict[str, float]


class RunUpdate(msgspec.Struct, frozen=True):
    """The run's row after an Op: all fields are written. ``lora`` and ``base`` change only by create-via-load."""

    id: str
    version: int
    weights: str | None
    moments: str | None
    gradients: tuple[tuple[int, str], ...]
    corrupted: bool = False


class Settlement(msgspec.Struct, frozen=True):
    """Everything that the end of one Op writes, in one transaction."""

    op_id: str
    state: Literal["done", "failed"]
    ended_at: float
    result: bytes | None = None
    content_type: str | None = None
    problem: Problem | None = None
    weights: str | None = None
    version: int | None = None
    run: RunUpdate | None = None
    checkpoint: Checkpoint | None = None
    sampling_session: SamplingSession | None = None
    ledger: LedgerLine | None = None
    durable: Version | None = None
    metrics: Metrics | None = None
    event: Event | None = None


class Page(msgspec.Struct, frozen=True):
    """``total`` counts all rows that match, not only those on the page."""

    offset: int
    limit: int
    total: int


class IdentityConflict(Exception):
    """The same (scope, seq) or derived id was used before with another body."""


class StoreError(Exception):
    """The database can't do it: disk full, damaged, locked, of another version. Nothing was written."""


class Fenced(StoreError):
    """Another server has taken this database over; nothing of this one is written any more."""


class Claim(msgspec.Struct, frozen=True):
    """Which life of a database may write to the archive: of two with different tokens, the one of the higher epoch."""

    epoch: int
    token: str


class Backup(msgspec.Struct, frozen=True):
    """What a copy of the database holds: all that was committed before ``taken_at``.

    ``live`` are the digests that it refers to, as of ``Store.live_digests``. ``versions`` are all durable ones.
    """

    taken_at: float
    live: set[str]
    versions: list[Version]


class Store(Protocol):
    """All methods raise nothing of SQL; a missing row is None. ``tenant`` None on read means the server itself."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def is_ours(self) -> bool:
        """Whether no other server has taken the database over since ``open``."""
        ...

    # sessions
    async def create_session(self, session: Session) -> None: ...
    async def get_session(self, tenant: str, session_id: str) -> Session | None: ...
    async def touch_session(self, tenant: str, session_id: str, at: float) -> bool: ...
    async def finish_session(self, tenant: str, session_id: str, finished: str, detail: str | None) -> bool:
        """First call wins; False when there is no such session."""
        ...

    async def list_sessions(self, tenant: str, limit: int, offset: int) -> tuple[list[Session], Page]: ...

    # ops
    async def submit(self, op: Op, new_run: Run | None = None) -> tuple[Op, bool]:
        """Write ``op`` (and the run it creates). Returns (op as stored, is_new).

        A replay (same scope, seq and body) returns the stored Op, whatever its state.
        Raises IdentityConflict when the body differs (seeds that the server draws are derived from the identity,
        so that a replay draws the same).
        """
        ...

    async def reject(self, op: Op, problem: Problem) -> Op:
        """Write ``op`` as rejected: its seq is consumed. A stored Op with that identity is returned unchanged."""
        ...

    async def get_op(self, tenant: str | None, op_id: str) -> Op | None: ...
    async def get_outcome(self, tenant: str | None, op_id: str) -> Op | None:
        """The same without the body (it is empty): what a poll needs, however large the request was."""
        ...

    async def unfinished_ops(self) -> list[Op]:
        """All accepted Ops of all tenants, by (accepted_at, seq): what a restarted server must run."""
        ...

    async def settle(self, settlement: Settlement) -> bool:
        """End an Op; False (and nothing written) when it had ended before. Advances the run's cursor."""
        ...

    async def expire_results(self, ended_before: float) -> int:
        """Empty the results of Ops that ended earlier (state "expired"); returns how many.

        Their bodies go too, but those of training Ops only when a durable version covers them.
        """
        ...

    async def training_ops(self, run_id: str, after_seq: int, to_seq: int) -> list[Op]:
        """The run's ended Ops with after_seq < seq <= to_seq, by seq, with their bodies: what a replay runs again."""
        ...

    async def seq_of_version(self, run_id: str, version: int) -> int | None:
        """The number of the Op that last made ``version`` of the run; 0 is made by its creation."""
        ...

    async def data_digest(self, run_id: str, to_seq: int) -> tuple[int, str]:
        """How many batches the run was trained on up to ``to_seq``, and a SHA-256 over those of their bodies."""
        ...

    # runs
    async def get_run(self, tenant: str | None, run_id: str) -> Run | None: ...
    async def get_run_and_session(self, tenant: str, run_id: str) -> tuple[Run, Session | None] | None:
        """A run and the session that it was made in."""
        ...

    async def list_runs(self, tenant: str | None, limit: int, offset: int) -> tuple[list[Run], Page]:
        """Newest first."""
        ...

    async def runs_of_session(self, tenant: str, session_id: str) -> list[Run]: ...

    async def restore(self, tenant: str, update: RunUpdate, durable: Version | None, event: Event) -> None:
        """Give the run another state, outside its Ops: a replay gave other bits, or somebody went back."""
        ...

    async def set_client_state(self, tenant: str, run_id: str, digest: str | None) -> bool:
        """Which object holds the client's own state of the run; False when there is no such run."""
        ...

    # durable versions, metrics, events
    async def put_version(self, version: Version) -> None: ...
    async def list_versions(self, tenant: str | None, run_id: str) -> list[Version]:
        """Newest first."""
        ...

    async def retain_versions(self, keep: int, finished_before: float) -> list[Version]:
        """Delete, and return, those of every run beyond its ``keep`` newest, and those that were made before
        ``finished_before`` of runs whose session is finished.
        """
        ...

    async def list_metrics(
        self, tenant: str | None, run_id: str, limit: int, offset: int
    ) -> tuple[list[Metrics], Page]:
        """Oldest first."""
        ...

    async def add_event(self, event: Event) -> None: ...
    async def list_events(
        self, tenant: str | None, run_id: str | None, limit: int, offset: int
    ) -> tuple[list[Event], Page]:
        """Newest first. Without a run: all that the tenant may see, the server's own included."""
        ...

    # sampling sessions
    async def put_sampling_session(self, session: SamplingSession) -> SamplingSession:
        """Idempotent by id: returns the stored row; raises IdentityConflict when base, weights or path differ."""
        ...

    async def get_sampling_session(self, tenant: str | None, sampling_session_id: str) -> SamplingSession | None: ...
    async def join_sampling_session(self, tenant: str, sampling_session_id: str) -> int | None:
        """A number >= 1, unique per call; None when there is no such session."""
        ...

    async def samplers_of_session(self, tenant: str, session_id: str) -> list[SamplingSession]: ...

    # checkpoints
    async def get_checkpoint(self, tenant: str | None, run_id: str, kind: str, name: str) -> Checkpoint | None:
        """With a tenant: its own, or anybody's public one. Expired ones are gone."""
        ...

    async def list_checkpoints(
        self, tenant: str | None, run_id: str | None, limit: int, offset: int
    ) -> tuple[list[Checkpoint], Page]:
        """Newest first; expired ones left out."""
        ...

    async def name_version(self, checkpoint: Checkpoint, event: Event | None = None) -> None:
        """Write a checkpoint of a run outside its Ops; it replaces one of that name."""
        ...

    async def put_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """Write one that no Op made. The one that has its path already stays; returns the stored one."""
        ...

    async def delete_checkpoint(self, tenant: str, run_id: str, kind: str, name: str) -> bool: ...
    async def set_checkpoint_ttl(
        self, tenant: str, run_id: str, kind: str, name: str, expires_at: float | None
    ) -> bool: ...
    async def set_checkpoint_public(self, tenant: str, run_id: str, kind: str, name: str, public: bool) -> bool: ...
    async def expiring_checkpoints(self, until: float) -> list[Checkpoint]:
        """Those whose expires_at comes no later, the first to expire first."""
        ...

    async def sweep_checkpoints(self, now: float) -> list[Checkpoint]:
        """Delete and return those whose expires_at has passed."""
        ...

    async def put_graph(self, graph: StoredGraph) -> None: ...
    async def get_graph(self, tenant: str | None, digest: str) -> StoredGraph | None: ...

    async def live_digests(self) -> set[str]:
        """Every digest that a run, a sampling session, a checkpoint or an unfinished Op refers to, and all graphs.

        Runs and sampling sessions of a finished session do not count, unless a run has unfinished Ops.
        """
        ...

    # copies of the database
    async def back_up(self, to: Path) -> Backup:
        """Write a consistent copy of the database to the new file ``to``, beside the work that goes on."""
        ...

    async def durable_mark(self) -> str | None:
        """Changes whenever a durable version or a checkpoint is written or deleted; None while there are none."""
        ...

    async def archive_claim(self) -> Claim:
        """This database's own; made when first asked for."""
        ...

    # ledger
    async def ledger_lines(
        self, tenant: str | None, run_id: str | None, limit: int, offset: int
    ) -> tuple[list[LedgerLine], Page]:
        """Oldest first."""
        ...

    async def ledger_total(
        self, tenant: str | None, run_id: str | None = None, session_id: str | None = None
    ) -> LedgerTotal: ...
