"""Computing a state of a run again: from a durable version and the Ops that came after it.

The journal keeps every body until a durable version covers it, and Tasks are pure; so what comes out are the arrays
that were there, with the digests that they had. Nothing of it is settled, billed or answered a second time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec.structs import replace

from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.compute.tasks import Done, Failed, Outcome
from gradserve.orchestration.dispatch import AttemptsExhausted
from gradserve.orchestration.lower import lower
from gradserve.orchestration.program import Program
from gradserve.orchestration.settle import Context, after, settle_done
from gradserve.settings import Settings
from gradserve.store.base import Checkpoint, Op, Run, Store, Version
from gradserve.wire.ops import ApplyGraph, ForwardBackward, LoadWeights, OpBody, decode_body

log = logging.getLogger(__name__)

Execute = Callable[[Program, str, list[str]], Awaitable[list[Outcome]]]
"""Runs a Program in the queue of a run and notes the objects that it made as held."""

_CHANGES_NOTHING = frozenset({"save_weights", "save_for_sampling", "sample", "evaluate", "create_loss"})
_RESETS = frozenset({"load", "rollback", "recovery"})
"""Causes of versions that no replay may pass: what they changed is not in the bodies of Ops."""


class Unrecoverable(Exception):
    """The state can't be computed again; the message says what is missing."""


@dataclass(frozen=True)
class Replayed:
    """The state after the Op at ``seq``, how many Ops were run again for it, and from which version on."""

    run: Run
    seq: int
    ops: int
    start: Version | None

    @property
    def origin(self) -> str:
        """Where it started, for people."""
        return "the beginning" if self.start is None else f"durable step {self.start.version}"


class Replay:
    """``held`` lists of its methods name objects that the caller must keep alive until it has stored who needs them."""

    def __init__(self, store: Store, objects: ObjectStore, execute: Execute, settings: Settings) -> None:
        self._store = store
        self._objects = objects
        self._execute = execute
        self._settings = settings

    async def to_seq(self, run: Run, seq: int, held: list[str]) -> Replayed:
        """The newest state after all ended Ops up to ``seq``. Raises Unrecoverable."""
        return await self._onward(run, await self._start(run, lambda version: version.seq <= seq), seq, held)

    async def to_version(self, run: Run, version: int, held: list[str]) -> Replayed:
        """The state right after the optimizer step that last made ``version``. Raises Unrecoverable."""
        seq = await self._store.seq_of_version(run.id, version)

        def fits(kept: Version) -> bool:
            # A rollback bears the number of the last Op before it, but what that Op made it has left.
            return kept.version == version or (seq is not None and kept.seq < seq)

        start = await self._start(run, fits)
        if start is not None and start.version == version:
            return Replayed(_at(run, start), start.seq, 0, start)
        if seq is None:
            raise Unrecoverable(f"step {version} is not in the journal of this run (any more)")
        return await self._onward(run, start, seq, held)

    async def _onward(self, run: Run, start: Version | None, seq: int, held: list[str]) -> Replayed:
        state, reached, count = _at(run, start), -1 if start is None else start.seq, 0
        for op in await self._store.training_ops(run.id, reached, seq):
            reached = op.seq
            if (again := _changing(op)) is not None:
                state, count = await self._again(op, again, state, held), count + 1
        if state.weights is None:
            raise Unrecoverable("its creation is not in the journal (any more)")
        return Replayed(state, reached, count, start)

    async def _start(self, run: Run, fits: Callable[[Version], bool]) -> Version | None:
        """The newest fitting version that is whole; None: begin with the creation of the run."""
        damaged: Version | None = None
        for version in await self._store.list_versions(None, run.id):
            if not fits(version):
                continue
            if await asyncio.to_thread(self._is_whole, version):
                if damaged is not None and damaged.cause in _RESETS:
                    raise Unrecoverable(
                        f"the arrays of step {damaged.version} (made by a {damaged.cause}) are damaged or missing; "
                        f"step {version.version} is good: gradserve rollback {run.id} --to {version.version}"
                    )
                return version
            damaged = damaged or version
            log.error("durable step %d of %s is not whole", version.version, run.id)
        if damaged is not None and damaged.cause in _RESETS:
            raise Unrecoverable(f"the arrays of step {damaged.version} are damaged or missing, and none older is kept")
        return None

    def _is_whole(self, version: Version) -> bool:
        whole = True
        for digest in (version.weights, version.moments):
            try:
                if digest is not None:
                    self._objects.verified_path(digest)
            except (ObjectMissing, ObjectCorrupt) as error:
                log.error("step %d of %s: %s", version.version, version.run_id, error)
                if isinstance(error, ObjectCorrupt):
                    self._objects.discard(error.digest)  # a file that is there would not be written again
                whole = False
        return whole

    async def _again(self, op: Op, body: OpBody, run: Run, held: list[str]) -> Run:
        program = lower(f"{op.id}~replay", body, run, self._settings.tokens_per_task)
        try:
            outcomes = await self._execute(program, run.id, held)
        except AttemptsExhausted as error:
            raise Unrecoverable(f"every worker that computed {op.kind} #{op.seq} again died ({error})") from error
        failed = next((outcome for outcome in outcomes if isinstance(outcome, Failed)), None)
        if failed is not None:
            raise Unrecoverable(f"{op.kind} #{op.seq}, which had succeeded, failed this time: {failed.message}")
        checkpoint = await self._loaded(op, body) if isinstance(body, LoadWeights) else None
        done = [outcome for outcome in outcomes if isinstance(outcome, Done)]
        context = Context(op, body, run, self._settings.prices, op.ended_at or op.accepted_at, checkpoint)
        return after(run, settle_done(context, done))

    async def _loaded(self, op: Op, body: LoadWeights) -> Checkpoint:
        """Only for loads of older servers, which wrote no version at a load."""
        owner, kind, name = body.path.removeprefix("tinker://").split("/")
        checkpoint = await self._store.get_checkpoint(op.tenant, owner, kind, name)
        if checkpoint is None:
            raise Unrecoverable(f"#{op.seq} loaded {body.path}, which is gone")
        return checkpoint


def _at(run: Run, start: Version | None) -> Run:
    """The run as it was at a durable version, or before its creation."""
    if start is None:
        return replace(run, version=0, weights=None, moments=None, gradients=())
    return replace(run, version=start.version, weights=start.weights, moments=start.moments, gradients=())


def _changing(op: Op) -> OpBody | None:
    """The body of an Op that changed its run's arrays; None for one that didn't. Raises Unrecoverable."""
    if op.problem is not None or op.kind in _CHANGES_NOTHING:
        return None
    if not op.body:
        raise Unrecoverable(f"the body of {op.kind} #{op.seq} has expired and no durable version covers it")
    body = decode_body(op.body)
    if isinstance(body, ForwardBackward | ApplyGraph) and not body.backward:
        return None
    return body
