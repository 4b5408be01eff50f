"""The loop: claim Ops from the store, let each be computed in its turn, write what comes out.

Parts: lanes (order within a run), endings (one Op: lower it to a Program, execute, settle), dispatch (Tasks to
workers), janitor (what nobody needs any more). Only this file knows them all.

Invariant: a run's state in memory is what its committed settlements give, plus those on their way to the store in
the same order. So the next Op may start while the last one is being committed, and a crash in between only means
that it is computed again. A client is told of a result only after it is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from gradserve.compute.catalog import Catalog
from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.executor import Executor, WorkerLost
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.compute.tasks import CheckTask, Task
from gradserve.orchestration.alarms import Alarms
from gradserve.orchestration.archiver import Archiver
from gradserve.orchestration.database_copier import DatabaseCopier
from gradserve.orchestration.dispatch import Dispatcher
from gradserve.orchestration.endings import Endings, failure_in
from gradserve.orchestration.execution import Execution
from gradserve.orchestration.folders import rebuild_missing
from gradserve.orchestration.held import Held
from gradserve.orchestration.janitor import Janitor
from gradserve.orchestration.lanes import Lane
from gradserve.orchestration.lower import sample_task_id
from gradserve.orchestration.manifest import Manifests
from gradserve.orchestration.mending import Mending
from gradserve.orchestration.program import Compute, Program
from gradserve.orchestration.recovery import Recovery, arrays_of
from gradserve.orchestration.replay import Replay
from gradserve.orchestration.same_base import SameBase
from gradserve.orchestration.settle import (
    after,
    cancelled,
    refusal,
    settle_failed,
)
from gradserve.orchestration.snapshots import Snapshots
from gradserve.orchestration.streams import TokenStream
from gradserve.settings import Settings
from gradserve.store.base import (
    Event,
    Fenced,
    Op,
    Run,
    Settlement,
    Store,
    StoreError,
)
from gradserve.store.wakeups import Ask, CheckGraph, MakeWhole, NameVersion, Rollback, Wakeups
from gradserve.wire.errors import Conflict, ServerError, UserError
from gradserve.wire.ops import STEPS

log = logging.getLogger(__name__)

_POLL_S = 5.0
_RETRY_S = 1.0
_MAKES_STATES = frozenset({*STEPS, "load_weights", "save_weights", "save_for_sampling"})
"""Kinds of Ops that replace a run's arrays, or keep them."""
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
        self._dispatcher = Dispatcher(executor, settings.task_attempts, settings.merge_tokens, self._moved)
        self._held = Held()
        self._execution = Execution(self._dispatcher, objects, self._held)
        self.alarms = Alarms(store)
        self._same_base = SameBase(store, catalog)
        manifests = Manifests(store, catalog, settings)
        replay = Replay(store, objects, self._execution.run, settings)
        mending = self._mending = Mending(store, objects, folders, replay, self._held)
        self._recovery = Recovery(store, objects, folders, replay, manifests, mending, self._held)
        self._endings = Endings(
            store, objects, folders, self._execution, self._recovery, mending, manifests, self._same_base, settings
        )
        self._snapshots = Snapshots(store, objects, manifests, settings, self.alarms, self._held)
        self._archiver = self._new_archiver()
        self._janitor = Janitor(store, objects, folders, settings, self.in_use, self._hot, self._archiver)
        self._background: set[asyncio.Task[None]] = set()
        executor.on_change = self._dispatcher.pump

    async def start(self) -> None:
        """Load unfinished Ops and begin to run them."""
        for op in await self._store.unfinished_ops():
            await self._admit(op)
        self._spawn(self._loop())
        self._spawn(self._janitor.run())
        self._spawn(rebuild_missing(self._store, self._objects, self._folders))
        if self._archiver is not None:
            self._spawn(self._archiver.run())
        self._launch_all()

    async def close(self) -> bool:
        """Stop; Ops that had not ended stay in the journal. ``park``; whether that could be done."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._dispatcher.close()
        kept = await self.park()
        if self._archiver is not None:
            await self._archiver.close()
        return kept

    def _new_archiver(self) -> Archiver | None:
        if self._objects.remote is None:
            return None
        scratch = self._settings.data_dir / "archive.tmp"
        copier = DatabaseCopier(self._store, self._objects.remote, self._held, scratch)
        return Archiver(self._store, self._objects, copier)

    async def sweep(self) -> None:
        """Let the janitor make a round now."""
        await self._janitor.sweep()

    async def park(self) -> bool:
        """Copy all live arrays to the durable tier. Then shared memory can be given back; False: it must stay."""
        for digest in await self._store.live_digests() | self.in_use():
            try:
                await asyncio.to_thread(self._objects.persist, digest)
            except ObjectMissing:
                continue
            except ObjectCorrupt as corrupt:
                log.error("not kept over the restart: %s", corrupt)
            except OSError as error:
                log.error(
                    "not all arrays could be copied to disk; shared memory keeps them for the next start: %s", error
                )
                return False
        return True

    def stream(self, op_id: str) -> contextlib.AbstractContextManager[TokenStream]:
        """The tokens of a sample as they are sampled; see Execution.stream."""
        return self._execution.stream(op_id)

    def in_use(self) -> set[str]:
        """Digests that lanes and running Programs refer to."""
        return self._hot() | self._held.digests()

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
            for ask, answer in self._wakeups.take_asks():
                self._spawn(self._answer(ask, answer))
            self._take_snapshots()
            self._forget_idle_lanes()

    def _forget_idle_lanes(self) -> None:
        limit = time.monotonic() - _FORGET_LANE_AFTER_S
        for run_id in [run_id for run_id, lane in self._lanes.items() if lane.idle and lane.touched_at < limit]:
            del self._lanes[run_id]

    async def _admit(self, op: Op) -> None:
        if op.kind in ("sample", "create_loss"):  # these wait for nobody; a sample's run_id only says whose bill it is
            if op.id not in self._samples:
                self._samples.add(op.id)
                self._spawn(self._run_op(op, None))
            return
        lane = self._lanes.get(op.scope) or await self._open_lane(op.scope)
        assert lane is not None, f"an Op of a run that does not exist: {op.id}"
        lane.add(op)

    async def _open_lane(self, run_id: str) -> Lane | None:
        """The lane of a run that slept; arrays that are gone or damaged are computed again before anything starts."""
        run = await self._store.get_run(None, run_id)
        if run is None:
            return None
        lane = self._lanes[run_id] = Lane(run, run.cursor + 1)
        for ended in await self._store.training_ops(run_id, run.cursor, 1 << 62):
            lane.end(ended.seq)  # readers may end before an earlier one
        if arrays_of(run):
            lane.resumed.clear()
            self._spawn(self._recover(lane))
        return lane

    def _launch_all(self) -> None:
        for lane in self._lanes.values():
            self._launch(lane)

    def _launch(self, lane: Lane) -> None:
        if lane.postponed is not None and lane.waiting and not lane.running and lane.resumed.is_set():
            lane.postponed = None
            lane.resumed.clear()
            self._spawn(self._recover(lane))
        self._start_ready(lane)

    def _start_ready(self, lane: Lane) -> None:
        for op in lane.start_ready():
            self._spawn(self._run_op(op, lane))

    async def _cancel(self, op: Op) -> bool:
        """Stop a sample, or a training Op that has not started. False when it can't be stopped (any more)."""
        if op.id in self._samples:
            self._execution.cancelled.add(op.id)
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
            settlement = await self._endings.of(op, lane, held)
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
            self._execution.cancelled.discard(op.id)
            self._held.release(held)
        self._wakeups.ended(op.id, _as_stored(op, settlement) if first else None)
        self._execution.ended(op.id)
        if op.kind in _MAKES_STATES:
            self._janitor.hint()

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
        elif op.kind in STEPS and settlement.run is not None:
            self._snapshots.stepped(run, op.seq, lane.uncovered_ms)
            lane.uncovered_ms = 0.0
            self._take_snapshots()

    def _take_snapshots(self) -> None:
        for run_id, cause in self._snapshots.due():
            self._spawn(self._snapshots.take(run_id, cause))

    # What is asked for beside Ops

    async def _answer(self, ask: Ask, answer: asyncio.Future[Any]) -> None:
        try:
            found = await self._found(ask)
        except (UserError, ServerError) as error:
            if not answer.done():
                answer.set_exception(error)
        except (OSError, StoreError) as error:
            if not answer.done():
                answer.set_exception(ServerError("storage.failed", f"The server could not write: {error}."))
        else:
            if not answer.done():
                answer.set_result(found)

    async def _found(self, ask: Ask) -> object:
        match ask:
            case NameVersion():
                return await self._recovery.name(ask)
            case Rollback():
                return await self._roll_back(ask)
            case MakeWhole():
                await self._mending.make_whole(ask)
                return None
            case CheckGraph():
                await self._check_graph(ask.digest)
                return None

    async def _check_graph(self, digest: str) -> None:
        program = Program(f"check:{digest}", (Compute(CheckTask(f"check:{digest}/0", digest)),))
        with self._held.during() as held:
            failed = failure_in(await self._execution.run(program, "graphs", held))
        if failed is not None:
            raise refusal(failed)

    async def _roll_back(self, ask: Rollback) -> Run:
        await self._recovery.run_of(ask.tenant, ask.run_id)
        lane = self._lanes.get(ask.run_id) or await self._open_lane(ask.run_id)
        assert lane is not None
        await lane.resumed.wait()
        if not lane.idle:
            raise Conflict(
                "run.busy",
                f"{ask.run_id} has requests that have not ended.",
                field="run_id",
                fix="Wait for them, or stop the script that sends them; then roll back.",
            )
        lane.resumed.clear()
        try:
            await self._recovery.roll_back(lane, ask.version)
            self._snapshots.covered(ask.run_id)
        finally:
            lane.resumed.set()
            self._launch(lane)
        return lane.run

    async def _recover(self, lane: Lane) -> None:
        if await self._same_base.wakes(lane.run):  # else its Ops are refused one by one
            await self._recovery.recover(lane)
        lane.resumed.set()
        self._start_ready(lane)  # also when it was postponed: then they are told so

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
