"""The loop: claim Ops from the store, lower them, dispatch their Tasks, settle what comes out.

Parts: lanes (order within a run), lower (Op to Program), dispatch (Tasks to workers), settle (outcomes to one
transaction), janitor (what nobody needs any more). They do not know each other; only this file does.

Invariant: a run's state in memory is what its committed settlements give, plus those on their way to the store in
the same order. So the next Op may start while the last one is being committed, and a crash in between only means
that it is computed again. A client is told of a result only after it is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import msgspec

from gradserve.compute.catalog import Catalog
from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.executor import Executor, WorkerLost
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.compute.tasks import Done, Failed, Outcome, SampleTask, Task
from gradserve.orchestration.alarms import Alarms
from gradserve.orchestration.dispatch import AttemptsExhausted, Dispatcher, TaskCancelled
from gradserve.orchestration.janitor import Janitor
from gradserve.orchestration.lanes import Lane
from gradserve.orchestration.lower import lower, sample_task_id
from gradserve.orchestration.manifest import Manifests
from gradserve.orchestration.program import Compute, Persist, Program
from gradserve.orchestration.replay import Replay, Replayed, Unrecoverable
from gradserve.orchestration.settle import (
    Context,
    after,
    cancelled,
    problem_of,
    settle_done,
    settle_failed,
    weights_corrupt,
)
from gradserve.orchestration.snapshots import Snapshots
from gradserve.orchestration.streams import TokenStream
from gradserve.settings import Settings
from gradserve.store.base import (
    Checkpoint,
    Event,
    EventKind,
    Fenced,
    Op,
    Run,
    RunUpdate,
    Settlement,
    Store,
    StoreError,
    Version,
)
from gradserve.store.wakeups import Ask, NameVersion, Rollback, Wakeups
from gradserve.wire.errors import Conflict, Gone, NotFound, Problem, ServerError, UserError
from gradserve.wire.ops import LoadWeights, OpBody, Sample, SaveWeights, decode_body

log = logging.getLogger(__name__)

_POLL_S = 5.0
_RETRY_S = 1.0
_FORGET_LANE_AFTER_S = 600.0
"""An idle run's state is read from the store again when it wakes; till then its arrays may leave shared memory."""


class Scheduler:
    """One per server. ``start`` also takes up what an earlier server left unfinished.

    ``on_fatal`` must stop the server: it is called when a settlement can't be written (the disk is full, say). Going
    on would put memory ahead of the journal for good; a new start computes the lost settlements again.
    """

    def __init__(
        self,
        store: Store,
        wakeups: Wakeups,
        executor: Executor,
        objects: ObjectStore,
        folders: CheckpointFolders,
        catalog: Catalog,
        settings: Settings,
        on_fatal: Callable[[], None],
    ) -> None:
        self._store = store
        self._on_fatal = on_fatal
        self._wakeups = wakeups
        self._executor = executor
        self._objects = objects
        self._folders = folders
        self._settings = settings
        self._lanes: dict[str, Lane] = {}
        self._samples: set[str] = set()
        self._cancelled: set[str] = set()
        self._streams: dict[str, TokenStream] = {}
        self._dispatcher = Dispatcher(executor, settings.task_attempts, settings.merge_tokens, self._moved)
        self._held: Counter[str] = Counter()
        self.alarms = Alarms(store)
        self._replay = Replay(store, objects, self._execute, settings)
        self._manifests = Manifests(store, catalog, settings)
        self._snapshots = Snapshots(store, objects, self._manifests, settings, self.alarms, self._hold, self._release)
        self._rebuilding: dict[str, asyncio.Task[None]] = {}
        self._janitor = Janitor(store, objects, folders, settings, self.in_use, self._hot)
        self._background: set[asyncio.Task[None]] = set()
        executor.on_change = self._dispatcher.pump

    async def start(self) -> None:
        """Load unfinished Ops and begin to run them."""
        for op in await self._store.unfinished_ops():
            await self._admit(op)
        self._spawn(self._loop())
        self._spawn(self._janitor.run())
        self._launch_all()

    async def close(self) -> None:
        """Stop; Ops that had not ended stay in the journal. Makes what runs need durable (see ``park``)."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._dispatcher.close()
        await self.park()

    async def sweep(self) -> None:
        """Let the janitor make a round now."""
        await self._janitor.sweep()

    async def park(self) -> None:
        """Copy all live arrays to the durable tier, so that shared memory can be given back."""
        for digest in await self._store.live_digests() | self.in_use():
            try:
                await asyncio.to_thread(self._objects.persist, digest)
            except ObjectMissing:
                continue
            except ObjectCorrupt as corrupt:
                log.error("not kept over the restart: %s", corrupt)

    @contextlib.contextmanager
    def stream(self, op_id: str) -> Iterator[TokenStream]:
        """The tokens of a sample as they are sampled, for one consumer inside the server.

        Enter before the Op is submitted. The stream ends when the Op has ended, well or not, and its result, which has
        all the tokens, is in the store; of an Op that ended earlier (a replay) nothing comes, not even the end.
        """
        stream = self._streams[op_id] = TokenStream()
        try:
            yield stream
        finally:
            del self._streams[op_id]

    def in_use(self) -> set[str]:
        """Digests that lanes and running Programs refer to."""
        return self._hot() | set(self._held)

    def lost_workers(self) -> int:
        """How often a Task had to be given to another worker."""
        return self._dispatcher.lost.total()

    def _hot(self) -> set[str]:
        digests: set[str] = set()
        for lane in self._lanes.values():
            digests.update(digest for digest in (lane.run.weights, lane.run.moments) if digest)
            digests.update(digest for _, digest in lane.run.gradients)
        return digests

    # The loop

    async def _loop(self) -> None:
        while True:
            for op in await self._wakeups.take_submitted(_POLL_S):
                await self._admit(op)
            self._launch_all()
            for op, told in self._wakeups.take_cancels():
                stops = await self._cancel(op)
                if not told.done():
                    told.set_result(stops)
            for ask, answer in self._wakeups.take_asks():
                self._spawn(self._answer(ask, answer))
            self._take_snapshots()
            self._forget_idle_lanes()

    def _forget_idle_lanes(self) -> None:
        limit = time.monotonic() - _FORGET_LANE_AFTER_S
        for run_id in [run_id for run_id, lane in self._lanes.items() if lane.idle and lane.touched_at < limit]:
            del self._lanes[run_id]

    async def _admit(self, op: Op) -> None:
        if op.kind == "sample":  # its run_id only says whose bill it is; it waits for nobody
            if op.id not in self._samples:
                self._samples.add(op.id)
                self._spawn(self._run_op(op, None))
            return
        lane = self._lanes.get(op.scope) or await self._open_lane(op.scope)
        assert lane is not None, f"an Op of a run that does not exist: {op.id}"
        lane.add(op)

    async def _open_lane(self, run_id: str) -> Lane | None:
        """The lane of a run that slept; if its arrays are gone they are computed again before anything starts."""
        run = await self._store.get_run(None, run_id)
        if run is None:
            return None
        lane = self._lanes[run_id] = Lane(run, run.cursor + 1)
        for ended in await self._store.training_ops(run_id, run.cursor, 1 << 62):
            lane.end(ended.seq)  # readers may end before an earlier one
        if self._missing(_arrays_of(run)):
            lane.paused = True
            self._spawn(self._recover(lane))
        return lane

    def _launch_all(self) -> None:
        for lane in self._lanes.values():
            self._launch(lane)

    def _launch(self, lane: Lane) -> None:
        for op in lane.start_ready():
            self._spawn(self._run_op(op, lane))

    async def _cancel(self, op: Op) -> bool:
        """Stop a sample, or a training Op that has not started. False when it can't be stopped (any more)."""
        if op.id in self._samples:
            self._cancelled.add(op.id)
            self._dispatcher.cancel(sample_task_id(op.id))
            return True
        lane = self._lanes.get(op.scope)
        if lane is None or not lane.withdraw(op.seq):
            return False
        # Before the lane goes on: after a crash nothing later may be in the journal without this.
        await self._store.settle(settle_failed(op, cancelled(), time.time()))
        self._wakeups.ended(op.id)
        lane.end(op.seq)
        self._launch(lane)
        return True

    # One Op

    async def _run_op(self, op: Op, lane: Lane | None) -> None:
        held: list[str] = []
        try:
            settlement = await self._settlement(op, lane, held)
            if lane is not None:
                run = lane.run = after(lane.run, settlement)
                lane.end(op.seq)
                self._launch(lane)
                async with lane.committing:
                    first = await self._commit(settlement)
                self._note(lane, run, op, settlement)
            else:
                first = await self._commit(settlement)
        finally:
            self._samples.discard(op.id)
            self._cancelled.discard(op.id)
            self._release(held)
        self._wakeups.ended(op.id, _as_stored(op, settlement) if first else None)
        if op.id in self._streams:
            self._streams[op.id].close()
        if op.kind in ("optim_step", "load_weights"):
            self._janitor.garbage()

    async def _commit(self, settlement: Settlement) -> bool:
        """Write the end of an Op. While that can't be done (a full disk) its run waits; nothing is lost."""
        while True:
            try:
                first = await self._store.settle(settlement)
            except Fenced:
                raise
            except StoreError as error:
                await self.alarms.raise_("journal", f"the journal can't be written, so results wait: {error}")
                await asyncio.sleep(_RETRY_S)
            else:
                await self.alarms.clear("journal")
                return first

    def _note(self, lane: Lane, run: Run, op: Op, settlement: Settlement) -> None:
        """Keep count of what a replay would have to do."""
        if settlement.ledger is not None:
            lane.uncovered_ms += float(settlement.ledger.compute_ms)
        if settlement.durable is not None:
            self._snapshots.covered(run.id)
            lane.uncovered_ms = 0.0
        elif op.kind == "optim_step" and settlement.run is not None:
            self._snapshots.stepped(run, op.seq, lane.uncovered_ms)
            lane.uncovered_ms = 0.0
            self._take_snapshots()

    def _take_snapshots(self) -> None:
        for run_id, cause in self._snapshots.due():
            self._spawn(self._snapshots.take(run_id, cause))

    # What was lost, computed again

    async def _recover(self, lane: Lane) -> None:
        run, started = lane.run, time.monotonic()
        with self._holding() as held:
            try:
                last = max((seq for seq, _ in run.gradients), default=run.cursor)
                replayed = await self._replay.to_seq(run, max(last, run.cursor), held)
            except Unrecoverable as error:
                log.error("run %s can't be recovered: %s", run.id, error)
                await self._tell(run, "weights_lost", str(error))
                lane.lost = str(error)
            else:
                await self._recovered(lane, replayed, time.monotonic() - started)
        lane.paused = False
        self._launch(lane)

    async def _recovered(self, lane: Lane, replayed: Replayed, seconds: float) -> None:
        run, state = lane.run, replayed.run
        what = f"{replayed.ops} requests run again from {replayed.origin}, 0 steps lost, {seconds:.1f} s, not billed"
        if _arrays_of(state) == _arrays_of(run):
            await self._tell(run, "recovered", what)
            return
        # Other bits: merged passes or another machine. The state is right to the bounds of docs/reference/numerics.md.
        event = _event(run, "recovered_differently", f"{what}; the last bits of the weights differ from before")
        await self._store.restore(run.tenant, _update_to(state), None, event)
        lane.run = _with_state_of(run, state)

    async def _find_sampled(self, op: Op, weights: str) -> None:
        """The weights that a sampling session froze, computed again if they are gone. Raises Gone."""
        if not self._missing([weights]):
            return
        task = self._rebuilding.get(weights)
        if task is None:
            task = self._rebuilding[weights] = asyncio.create_task(self._rebuild(op, weights))
            task.add_done_callback(lambda _: self._rebuilding.pop(weights, None))
        await asyncio.shield(task)

    async def _rebuild(self, op: Op, weights: str) -> None:
        session = await self._store.get_sampling_session(None, op.scope)
        run = None if session is None or session.run_id is None else await self._store.get_run(None, session.run_id)
        if session is None or run is None or session.run_version is None:
            raise _lost("there is no run to compute them from")
        with self._holding() as held:
            try:
                replayed = await self._replay.to_version(run, session.run_version, held)
            except Unrecoverable as error:
                raise _lost(str(error)) from error
            if replayed.run.weights != weights:
                raise _lost("computing them again gave other last bits")
            await self._tell(run, "recovered", f"weights of step {replayed.run.version} for sampling computed again")

    def _missing(self, digests: Iterable[str]) -> bool:
        try:
            for digest in digests:
                self._objects.path(digest)
        except ObjectMissing:
            return True
        return False

    # What is asked for beside Ops

    async def _answer(self, ask: Ask, answer: asyncio.Future[Any]) -> None:
        try:
            found: object = await (self._name(ask) if isinstance(ask, NameVersion) else self._roll_back(ask))
        except (UserError, ServerError) as error:
            if not answer.done():
                answer.set_exception(error)
        except (OSError, StoreError) as error:
            if not answer.done():
                answer.set_exception(ServerError("storage.failed", f"The server could not write: {error}."))
        else:
            if not answer.done():
                answer.set_result(found)

    async def _name(self, ask: NameVersion) -> Checkpoint:
        run = await self._run_of(ask.tenant, ask.run_id)
        with self._holding() as held:
            state = await self._state_at(run, ask.version, held)
            assert state.weights is not None
            size = await self._persist(state)
            now = time.time()
            checkpoint = Checkpoint(
                run_id=run.id,
                tenant=run.tenant,
                kind="weights",
                name=ask.name,
                base=run.base,
                lora=run.lora,
                version=state.version,
                weights=state.weights,
                moments=state.moments,
                size_bytes=size,
                created_at=now,
                expires_at=None if ask.ttl_seconds is None else now + ask.ttl_seconds,
                client_state=run.client_state,
            )
            await asyncio.to_thread(self._write_folder, checkpoint)
            event = (
                None if ask.purpose is None else _event(run, ask.purpose, f"step {state.version} as {checkpoint.path}")
            )
            await self._store.put_checkpoint(checkpoint, event)
        return checkpoint

    async def _roll_back(self, ask: Rollback) -> Run:
        run = await self._run_of(ask.tenant, ask.run_id)
        lane = self._lanes.get(run.id) or await self._open_lane(run.id)
        assert lane is not None
        if not lane.idle:
            raise Conflict(
                "run.busy",
                f"{run.id} has requests that have not ended.",
                field="run_id",
                fix="Wait for them, or stop the script that sends them; then roll back.",
            )
        lane.paused = True
        try:
            with self._holding() as held:
                run = lane.run
                state = await self._state_at(run, ask.version, held)
                version = Version(
                    run_id=run.id,
                    tenant=run.tenant,
                    version=state.version,
                    seq=lane.head - 1,
                    weights=state.weights or "",
                    moments=state.moments,
                    cause="rollback",
                    size_bytes=await self._persist(state),
                    created_at=time.time(),
                    manifest=await self._manifests.of(state, lane.head - 1),
                )
                event = _event(run, "rolled_back", f"from step {run.version} to step {state.version}")
                await self._store.restore(run.tenant, _update_to(state), version, event)
                self._snapshots.covered(run.id)
                lane.run, lane.lost = _with_state_of(run, state), None
        finally:
            lane.paused = False
            self._launch(lane)
        return lane.run

    async def _run_of(self, tenant: str, run_id: str) -> Run:
        run = await self._store.get_run(tenant, run_id)
        if run is None:
            raise NotFound("run.unknown", f"There is no run {run_id!r}.", field="run_id")
        return run

    async def _state_at(self, run: Run, version: int | None, held: list[str]) -> Run:
        """The run right after an optimizer step. Raises NotFound when it can't be had any more."""
        wanted = run.version if version is None else version
        if run.version == wanted and not run.gradients and run.weights and not self._missing(_arrays_of(run)):
            held.extend(_arrays_of(run))
            self._hold(_arrays_of(run))
            return run
        try:
            return (await self._replay.to_version(run, wanted, held)).run
        except Unrecoverable as error:
            kept = sorted({version.version for version in await self._store.list_versions(None, run.id)})
            raise NotFound(
                "version.gone",
                f"Step {wanted} of {run.id} can't be had: {error}.",
                field="version",
                fix=f"Durable steps: {', '.join(map(str, kept)) or 'none'}; the run is at step {run.version}.",
            ) from error

    async def _persist(self, state: Run) -> int:
        """Make a state's arrays durable; their bytes."""
        for digest in (state.weights, state.moments):
            if digest is not None:
                await asyncio.to_thread(self._objects.persist, digest)
        return sum(self._objects.size(digest) for digest in (state.weights, state.moments) if digest is not None)

    def _moved(self, task: Task, queue: str, loss: WorkerLost, seconds: float) -> None:
        """A Task whose worker was lost is in the hands of another."""
        op_id = task.id.rpartition("/")[0]
        self._spawn(self._tell_moved(op_id, loss, seconds))

    async def _tell_moved(self, op_id: str, loss: WorkerLost, seconds: float) -> None:
        op = await self._store.get_outcome(None, op_id)
        if op is None or op.run_id is None:
            return
        detail = f"worker lost ({loss.reason.detail}) during {op.kind}, 0 steps lost, {seconds:.1f} s, not billed"
        await self._store.add_event(Event(time.time(), "worker_lost", detail, op.tenant, op.run_id, op.seq))

    async def _tell(self, run: Run, kind: EventKind, detail: str) -> None:
        await self._store.add_event(_event(run, kind, detail))

    def _hold(self, digests: Iterable[str]) -> None:
        self._held.update(digests)

    def _release(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._held[digest] -= 1
        self._held = +self._held

    @contextlib.contextmanager
    def _holding(self) -> Iterator[list[str]]:
        """Objects that are put into this list through ``_execute`` are kept till the end of the block."""
        held: list[str] = []
        try:
            yield held
        finally:
            self._release(held)

    async def _settlement(self, op: Op, lane: Lane | None, held: list[str]) -> Settlement:
        try:
            body = decode_body(op.body)
            run = lane.run if lane is not None else None
            program = lower(op.id, body, run, self._settings.tokens_per_task)
            if isinstance(body, Sample) and body.weights is not None:
                await self._find_sampled(op, body.weights)
            self._check_arrays(lane, body, run)
            outcomes = await self._execute(program, lane.run.id if lane else op.scope, held)
            failed = next((outcome for outcome in outcomes if isinstance(outcome, Failed)), None)
            if failed is not None:
                if failed.traceback:
                    log.error("task %s failed:\n%s", failed.task_id, failed.traceback)
                return settle_failed(op, problem_of(failed), time.time())
            done = [outcome for outcome in outcomes if isinstance(outcome, Done)]
            # lane.run again: another forward_backward of this run may have ended meanwhile
            context = await self._context(op, body, lane.run if lane else None)
            settlement = settle_done(context, done)
            if settlement.checkpoint is not None:
                await asyncio.to_thread(self._write_folder, settlement.checkpoint)
            return settlement
        except (UserError, ServerError) as error:
            return settle_failed(op, error.problem(), time.time())
        except TaskCancelled:
            return settle_failed(op, cancelled(), time.time())
        except ObjectCorrupt as corrupt:
            log.error("op %s failed: %s", op.id, corrupt)
            return settle_failed(op, weights_corrupt(f"object {corrupt.digest} is damaged").problem(), time.time())
        except AttemptsExhausted as exhausted:
            return settle_failed(op, _worker_lost(exhausted), time.time())
        except OSError as error:
            log.exception("op %s failed", op.id)
            problem = ServerError("storage.failed", f"The server could not write: {error}.").problem()
            return settle_failed(op, problem, time.time())
        except Exception as error:
            log.exception("op %s failed", op.id)
            problem = ServerError("server.fault", f"The server failed at this request: {error!r}.").problem()
            return settle_failed(op, problem, time.time())

    async def _execute(self, program: Program, queue: str, held: list[str]) -> list[Outcome]:
        """Run the steps of a Program, each as soon as those it needs are done; stops at a failure."""
        log.debug("%s", program)
        outcomes: dict[int, Outcome] = {}
        waiting = dict(enumerate(program.steps))
        while waiting:
            computed = {
                number: step
                for number, step in waiting.items()
                if isinstance(step, Compute) and outcomes.keys() >= set(step.after)
            }
            persisted = [step for step in waiting.values() if isinstance(step, Persist)]
            waiting = {n: step for n, step in waiting.items() if isinstance(step, Compute) and n not in computed}
            results = await asyncio.gather(
                *(self._compute(program.op_id, step.bind(outcomes), queue, held) for step in computed.values())
            )
            outcomes.update(zip(computed, results, strict=True))
            if any(isinstance(outcome, Failed) for outcome in results):
                break
            for step in persisted:
                for digest in step.digests:
                    await asyncio.to_thread(self._objects.persist, digest)
        return [outcomes[number] for number in sorted(outcomes)]

    async def _compute(self, op_id: str, task: Task, queue: str, held: list[str]) -> Outcome:
        """Run one Task. What it made is kept from the janitor from now on, however long its siblings take."""
        if op_id in self._cancelled:
            raise TaskCancelled(task.id)
        stream = self._streams.get(op_id)
        if stream is not None and isinstance(task, SampleTask):
            task = msgspec.structs.replace(task, stream=True)
        outcome = await self._dispatcher.run(task, queue, stream)
        if isinstance(outcome, Done):
            held.extend(outcome.objects.values())
            self._held.update(outcome.objects.values())
        return outcome

    def _check_arrays(self, lane: Lane | None, body: OpBody, run: Run | None) -> None:
        """Say it when arrays are gone for good, instead of failing in a worker."""
        if run is not None and not isinstance(body, LoadWeights) and self._missing(_arrays_of(run)):
            raise _lost(lane.lost if lane is not None and lane.lost else "they are in no store")

    async def _context(self, op: Op, body: OpBody, run: Run | None) -> Context:
        checkpoint: Checkpoint | None = None
        size = 0
        if isinstance(body, SaveWeights) and run is not None and run.weights is not None:
            checkpoint = await self._store.get_checkpoint(op.tenant, run.id, body.kind, body.name)
            size = self._objects.size(run.weights)
            if body.kind == "weights" and run.moments is not None:
                size += self._objects.size(run.moments)
        elif isinstance(body, LoadWeights):
            owner, kind, name = body.path.removeprefix("tinker://").split("/")
            checkpoint = await self._store.get_checkpoint(op.tenant, owner, kind, name)
        return Context(op, body, run, self._settings.prices, time.time(), checkpoint, size)

    def _write_folder(self, checkpoint: Checkpoint) -> None:
        self._folders.write(
            checkpoint.run_id,
            checkpoint.kind,
            checkpoint.name,
            checkpoint.base,
            checkpoint.lora,
            checkpoint.weights,
            checkpoint.moments,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Neither the loop nor the end of an Op may fail quietly: clients would wait for ever.
            log.critical("the scheduler failed; stopping", exc_info=task.exception())
            self._on_fatal()


def _arrays_of(run: Run) -> list[str]:
    """The digests that make up a run's state."""
    return [*(digest for digest in (run.weights, run.moments) if digest), *(digest for _, digest in run.gradients)]


def _update_to(state: Run) -> RunUpdate:
    return RunUpdate(state.id, state.version, state.weights, state.moments, state.gradients)


def _with_state_of(run: Run, state: Run) -> Run:
    """The run with the arrays of another of its states."""
    return msgspec.structs.replace(
        run, version=state.version, weights=state.weights, moments=state.moments, gradients=state.gradients
    )


def _event(run: Run, kind: EventKind, detail: str) -> Event:
    return Event(time.time(), kind, detail, run.tenant, run.id)


def _lost(why: str) -> Gone:
    return Gone(
        "weights.lost",
        f"The arrays of this run are lost and can't be computed again: {why}.",
        fix="Create a training client from the last saved state, or roll back (gradserve checkpoints lists the steps).",
    )


def _as_stored(op: Op, end: Settlement) -> Op:
    """The Op as the store has it after ``end``, without its body."""
    return msgspec.structs.replace(
        op,
        body=b"",
        state=end.state,
        ended_at=end.ended_at,
        result=end.result,
        content_type=end.content_type,
        problem=end.problem,
        weights=end.weights,
        version=end.version,
    )


def _worker_lost(exhausted: AttemptsExhausted) -> Problem:
    loss = exhausted.__cause__
    assert isinstance(loss, WorkerLost)
    code = "compute.out_of_memory" if loss.reason.kind == "out_of_memory" else "compute.worker_lost"
    return ServerError(
        code,
        f"Every worker that tried this request died; the last one {loss.reason.detail}.",
        fix="If it was out of memory, send shorter or fewer rows.",
    ).problem()
