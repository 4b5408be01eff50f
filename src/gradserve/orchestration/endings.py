"""One Op, from its body to its end: lowered, computed, settled; or why not, in words for the client.

Arrays that turn out to be damaged on the way are computed again, once.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.executor import WorkerLost
from gradserve.compute.objects import ObjectCorrupt, ObjectStore
from gradserve.compute.tasks import Done, Failed, Outcome
from gradserve.orchestration.dispatch import AttemptsExhausted, TaskCancelled
from gradserve.orchestration.execution import Execution
from gradserve.orchestration.lanes import Lane
from gradserve.orchestration.lower import lower
from gradserve.orchestration.manifest import Manifests
from gradserve.orchestration.mending import Mending
from gradserve.orchestration.recovery import Recovery, arrays_of, lost, missing, write_folder
from gradserve.orchestration.same_base import SameBase
from gradserve.orchestration.settle import (
    Context,
    after,
    cancelled,
    problem_of,
    settle_done,
    settle_failed,
    weights_corrupt,
)
from gradserve.settings import Settings
from gradserve.store.base import Checkpoint, Op, Run, Settlement, Store
from gradserve.store.wakeups import MakeWhole, Role
from gradserve.wire.errors import Problem, ServerError, UserError
from gradserve.wire.ops import LoadWeights, OpBody, Sample, SaveWeights, decode_body

log = logging.getLogger(__name__)


class Endings:
    """Knows no queue: the scheduler says when an Op may be computed, and writes what comes of it."""

    def __init__(
        self,
        store: Store,
        objects: ObjectStore,
        folders: CheckpointFolders,
        execution: Execution,
        recovery: Recovery,
        mending: Mending,
        manifests: Manifests,
        same_base: SameBase,
        settings: Settings,
    ) -> None:
        self._store = store
        self._objects = objects
        self._folders = folders
        self._execution = execution
        self._recovery = recovery
        self._mending = mending
        self._manifests = manifests
        self._same_base = same_base
        self._settings = settings

    async def of(self, op: Op, lane: Lane | None, held: list[str]) -> Settlement:
        """Compute an Op (``lane`` None: a sample) and say how it ended. Never raises.

        ``held`` gets the objects that must be kept alive until that is written.
        """
        try:
            body = decode_body(op.body)
            outcomes = await self._compute_or_repair(op, body, lane, held)
            failed = failure_in(outcomes)
            if failed is not None:
                if failed.traceback:
                    log.error("task %s failed:\n%s", failed.task_id, failed.traceback)
                return settle_failed(op, problem_of(failed), time.time())
            done = [outcome for outcome in outcomes if isinstance(outcome, Done)]
            # lane.run again: another forward_backward of this run may have ended meanwhile
            context = await self._context(op, body, lane.run if lane else None)
            settlement = settle_done(context, done)
            if settlement.durable is not None and context.run is not None:
                manifest = await self._manifests.of(after(context.run, settlement), op.seq)
                version = msgspec.structs.replace(settlement.durable, manifest=manifest)
                settlement = msgspec.structs.replace(settlement, durable=version)
            if settlement.checkpoint is not None:
                await asyncio.to_thread(write_folder, self._folders, settlement.checkpoint)
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

    async def _compute_or_repair(self, op: Op, body: OpBody, lane: Lane | None, held: list[str]) -> list[Outcome]:
        """The outcomes of an Op; if its run's arrays turn out to be damaged they are computed again first, once."""
        try:
            outcomes = await self._compute_op(op, body, lane, held)
            if (failed := failure_in(outcomes)) is None or failed.kind != "corrupt":
                return outcomes
            if lane is None:
                assert isinstance(body, Sample)
                if body.weights is None:
                    return outcomes
                await self._recovery.mend_sampled(op, body.weights)
                return await self._compute_op(op, body, lane, held)
        except ObjectCorrupt:
            if lane is None:
                raise
            outcomes = []
        # Not beside other Ops of the run: their gradients may be on their way into the state that is replaced.
        repaired = len(lane.running) == 1 and await self._recovery.recover(lane)
        if repaired or not outcomes:
            return await self._compute_op(op, body, lane, held)
        return outcomes

    async def _compute_op(self, op: Op, body: OpBody, lane: Lane | None, held: list[str]) -> list[Outcome]:
        run = lane.run if lane is not None else None
        if run is not None:
            await self._same_base.require_of_run(run)
        elif isinstance(body, Sample):
            await self._same_base.require_of_sample(op, body)
        program = lower(op.id, body, run, self._settings.tokens_per_task)
        if isinstance(body, Sample) and body.weights is not None:
            await self._recovery.find_sampled(op, body.weights)
        await self._check_arrays(lane, body, run)
        return await self._execution.run(program, lane.run.id if lane else op.scope, held)

    async def _check_arrays(self, lane: Lane | None, body: OpBody, run: Run | None) -> None:
        """Say it when arrays are gone for good, instead of failing in a worker."""
        if run is not None and not isinstance(body, LoadWeights) and await missing(self._objects, arrays_of(run)):
            if lane is not None and lane.postponed is not None:
                raise lane.postponed
            raise lost(lane.lost if lane is not None and lane.lost else "they are in no store")

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
            if checkpoint is not None:
                moments: tuple[Role, ...] = ("optimizer moments",) if body.optimizer else ()
                await self._mending.make_whole(MakeWhole.of(checkpoint, op.tenant, "weights", *moments))
        return Context(op, body, run, self._settings.prices, time.time(), checkpoint, size)


def failure_in(outcomes: list[Outcome]) -> Failed | None:
    """The first Task that failed."""
    return next((outcome for outcome in outcomes if isinstance(outcome, Failed)), None)


def _worker_lost(exhausted: AttemptsExhausted) -> Problem:
    loss = exhausted.__cause__
    assert isinstance(loss, WorkerLost)
    code = "compute.out_of_memory" if loss.reason.kind == "out_of_memory" else "compute.worker_lost"
    return ServerError(
        code,
        f"Every worker that tried this request died; the last one {loss.reason.detail}.",
        fix="If it was out of memory, send shorter or fewer rows.",
    ).problem()
