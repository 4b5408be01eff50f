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
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec

from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.executor import Executor, WorkerLost
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.compute.tasks import Done, Failed, Outcome, SampleTask, Task
from gradserve.orchestration.archiver import Archiver
from gradserve.orchestration.dispatch import AttemptsExhausted, Dispatcher, TaskCancelled
from gradserve.orchestration.janitor import Janitor
from gradserve.orchestration.lanes import Lane
from gradserve.orchestration.lower import lower, sample_task_id
from gradserve.orchestration.program import Compute, Persist, Program
from gradserve.orchestration.settle import Context, cancelled, problem_of, settle_done, settle_failed, weights_corrupt
from gradserve.orchestration.streams import TokenStream
from gradserve.settings import Settings
from gradserve.store.base import Checkpoint, Op, Run, Settlement, Store
from gradserve.store.wakeups import Wakeups
from gradserve.wire.errors import Gone, Problem, ServerError, UserError
from gradserve.wire.ops import LoadWeights, OpBody, Sample, SaveWeights, decode_body

log = logging.getLogger(__name__)

_POLL_S = 5.0
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
        self._dispatcher = Dispatcher(executor, settings.task_attempts, settings.merge_tokens)
        self._held: Counter[str] = Counter()
        self._archiver = Archiver(objects) if objects.has_archive else None
        self._janitor = Janitor(store, objects, folders, settings.result_ttl_s, self.in_use, self._hot, self._archiver)
        self._background: set[asyncio.Task[None]] = set()
        executor.on_change = self._dispatcher.pump

    async def start(self) -> None:
        """Load unfinished Ops and begin to run them."""
        for op in await self._store.unfinished_ops():
            await self._admit(op)
        self._spawn(self._loop())
        self._spawn(self._janitor.run())
        if self._archiver is not None:
            self._spawn(self._archiver.run())
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

    def archive_status(self) -> dict[str, Any] | None:
        """How far the archive is behind, and why; None without one."""
        return None if self._archiver is None else self._archiver.status()

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
        lane = self._lanes.get(op.scope)
        if lane is None:
            run = await self._store.get_run(None, op.scope)
            assert run is not None, f"an Op of a run that does not exist: {op.id}"
            lane = self._lanes[op.scope] = Lane(run, run.cursor + 1)
        lane.add(op)

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
                if settlement.run is not None:
                    lane.run = _after(lane.run, settlement)
                lane.end(op.seq)
                self._launch(lane)
            first = await self._store.settle(settlement)
        finally:
            self._samples.discard(op.id)
            self._cancelled.discard(op.id)
            for digest in held:
                self._held[digest] -= 1
            self._held = +self._held
        self._wakeups.ended(op.id, _as_stored(op, settlement) if first else None)
        if op.id in self._streams:
            self._streams[op.id].close()
        if op.kind in ("optim_step", "load_weights"):
            self._janitor.garbage()

    async def _settlement(self, op: Op, lane: Lane | None, held: list[str]) -> Settlement:
        try:
            body = decode_body(op.body)
            run = lane.run if lane is not None else None
            program = lower(op.id, body, run, self._settings.tokens_per_task)
            await self._check_arrays(body, run)
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

    async def _check_arrays(self, body: OpBody, run: Run | None) -> None:
        """After a power cut shared memory is empty: say so, instead of failing in a worker."""
        needed = [body.weights] if isinstance(body, Sample) else []
        if run is not None and not isinstance(body, LoadWeights):
            needed += [run.weights, run.moments, *(digest for _, digest in run.gradients)]
        for digest in needed:
            if digest is None or self._objects.has(digest):
                continue
            try:
                await asyncio.to_thread(self._objects.verified_path, digest)  # the archive may have it
            except ObjectMissing:
                raise Gone(
                    "weights.lost",
                    "The machine was restarted and these weights had not been saved.",
                    fix="Create a training client from the last saved state.",
                ) from None

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


def _after(run: Run, settlement: Settlement) -> Run:
    """The run's row as the settlement will have written it."""
    assert settlement.run is not None
    changes = {name: getattr(settlement.run, name) for name in settlement.run.__struct_fields__}
    return msgspec.structs.replace(run, **changes)


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
