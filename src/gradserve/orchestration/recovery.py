"""Having a state of a run again: after its arrays were lost, for a name, or to go back to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

import msgspec

from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.orchestration.dispatch import NoWorkers
from gradserve.orchestration.held import Held
from gradserve.orchestration.lanes import Lane
from gradserve.orchestration.manifest import Manifests
from gradserve.orchestration.mending import Aside, Mending
from gradserve.orchestration.replay import Replay, Replayed, Unrecoverable
from gradserve.store.base import Checkpoint, Event, EventKind, Op, Run, RunUpdate, Store, Version
from gradserve.store.wakeups import MakeWhole, NameVersion
from gradserve.wire.errors import Gone, NotFound

log = logging.getLogger(__name__)


class Recovery:
    """Knows no queue: the scheduler sees to it that nothing else runs in a lane that is recovered or rolled back."""

    def __init__(
        self,
        store: Store,
        objects: ObjectStore,
        folders: CheckpointFolders,
        replay: Replay,
        manifests: Manifests,
        mending: Mending,
        held: Held,
    ) -> None:
        self._store = store
        self._objects = objects
        self._folders = folders
        self._replay = replay
        self._manifests = manifests
        self._mending = mending
        self._held = held

    async def recover(self, lane: Lane) -> bool:
        """See to it that the arrays of a lane's run are whole; what is not is computed again.

        False where that can't be done: then ``lane.lost`` says why, or ``lane.postponed`` when it may be done later.
        """
        run, started = lane.run, time.monotonic()
        broken = await asyncio.to_thread(self._broken, arrays_of(run))
        if not broken:
            return True
        aside = Aside(self._objects, broken)
        with self._held.during() as held:
            try:
                async with lane.committing:  # the ends of all that came before are in the journal then
                    last = max([lane.head - 1, *(seq for seq, _ in run.gradients)])
                replayed = await self._replay.to_seq(run, last, held)
            except Unrecoverable as error:
                aside.put_back()
                log.error("run %s can't be recovered: %s", run.id, error)
                await self._tell(run, "weights_lost", str(error))
                lane.lost = str(error)
                return False
            except NoWorkers as error:
                aside.put_back()
                log.error("run %s can't be recovered yet: %s", run.id, error)
                lane.postponed = error
                return False
            same = await self._recovered(lane, replayed, time.monotonic() - started)
        if same:
            aside.remove()
        else:
            aside.put_back()  # a kept state may be these arrays
        return True

    def _broken(self, digests: Iterable[str]) -> list[str]:
        """Those that are missing or damaged, in this machine's tiers and in the archive."""
        broken = []
        for digest in digests:
            try:
                self._objects.verified_path(digest)
            except ObjectMissing:
                log.warning("object %s is lost; computing it again", digest)
                broken.append(digest)
            except ObjectCorrupt as error:
                log.error("%s; computing it again", error)
                broken.append(digest)
        return broken

    async def _recovered(self, lane: Lane, replayed: Replayed, seconds: float) -> bool:
        """Take the state up; whether it has the bits that were lost."""
        run, state = lane.run, replayed.run
        what = f"{replayed.ops} requests run again from {replayed.origin}, 0 steps lost, {seconds:.1f} s, not billed"
        if arrays_of(state) == arrays_of(run):
            await self._tell(run, "recovered", what)
            await self._keep_again(run)
            return True
        # Other bits: merged passes or another machine. The state is right to the bounds of docs/reference/numerics.md.
        event = _event(run, "recovered_differently", f"{what}; the last bits of the weights differ from before")
        await self._store.restore(run.tenant, _update_to(state), None, event)
        lane.run = with_state_of(run, state)
        return False

    async def _keep_again(self, run: Run) -> None:
        """Named or durable states of the run that share the arrays are whole again too."""
        try:
            await self._mending.keep_again(run.id, set(arrays_of(run)))
        except OSError as error:
            log.error("what was computed again of %s is not durable yet: %s", run.id, error)

    async def find_sampled(self, op: Op, weights: str) -> None:
        """The weights that a sampling session froze, computed again if they are gone. Raises Gone, ServerError."""
        if await missing(self._objects, [weights]):
            await self.mend_sampled(op, weights)

    async def mend_sampled(self, op: Op, weights: str) -> None:
        """The same, of weights that may be damaged."""
        session = await self._store.get_sampling_session(None, op.scope)
        if session is None or session.run_id is None or session.run_version is None:
            raise lost("there is no run to compute them from")
        name = session.model_path or f"sampling session {session.id}"
        frozen = MakeWhole(op.tenant, name, session.run_id, session.run_version, {weights: "weights"})
        await self._mending.make_whole(frozen)

    async def name(self, ask: NameVersion) -> Checkpoint:
        """Make a step a checkpoint. Raises NotFound."""
        run = await self.run_of(ask.tenant, ask.run_id)
        with self._held.during() as held:
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
            await asyncio.to_thread(write_folder, self._folders, checkpoint)
            event = (
                None if ask.purpose is None else _event(run, ask.purpose, f"step {state.version} as {checkpoint.path}")
            )
            await self._store.name_version(checkpoint, event)
        return checkpoint

    async def roll_back(self, lane: Lane, wanted: int) -> None:
        """Make an earlier step the state of a lane in which nothing runs. Raises NotFound."""
        with self._held.during() as held:
            run, seq = lane.run, lane.head - 1
            state = await self._state_at(run, wanted, held)
            assert state.weights is not None
            version = Version(
                run_id=run.id,
                tenant=run.tenant,
                version=state.version,
                seq=seq,
                weights=state.weights,
                moments=state.moments,
                cause="rollback",
                size_bytes=await self._persist(state),
                created_at=time.time(),
                manifest=await self._manifests.of(state, seq),
            )
            event = _event(run, "rolled_back", f"from step {run.version} to step {state.version}")
            await self._store.restore(run.tenant, _update_to(state), version, event)
            lane.run, lane.lost, lane.postponed = with_state_of(run, state), None, None

    async def run_of(self, tenant: str, run_id: str) -> Run:
        """The tenant's run. Raises NotFound."""
        run = await self._store.get_run(tenant, run_id)
        if run is None:
            raise NotFound("run.unknown", f"There is no run {run_id!r}.", field="run_id")
        return run

    async def _state_at(self, run: Run, version: int | None, held: list[str]) -> Run:
        """The run right after an optimizer step. Raises NotFound when it can't be had any more."""
        wanted = run.version if version is None else version
        if (
            run.version == wanted
            and not run.gradients
            and run.weights
            and not await missing(self._objects, arrays_of(run))
        ):
            held.extend(arrays_of(run))
            self._held.add(arrays_of(run))
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

    async def _tell(self, run: Run, kind: EventKind, detail: str) -> None:
        await self._store.add_event(_event(run, kind, detail))


async def missing(objects: ObjectStore, digests: Iterable[str]) -> bool:
    """Whether one of them is in no store. What only the archive has is fetched."""
    try:
        for digest in digests:
            if not objects.has(digest):
                await asyncio.to_thread(objects.verified_path, digest)
    except (ObjectMissing, ObjectCorrupt):
        return True
    return False


def arrays_of(run: Run) -> list[str]:
    """The digests that make up a run's state."""
    return [*(digest for digest in (run.weights, run.moments) if digest), *(digest for _, digest in run.gradients)]


def write_folder(folders: CheckpointFolders, checkpoint: Checkpoint) -> None:
    """The readable folder of a checkpoint."""
    folders.write(
        checkpoint.run_id,
        checkpoint.kind,
        checkpoint.name,
        checkpoint.base,
        checkpoint.lora,
        checkpoint.weights,
        checkpoint.moments,
    )


def with_state_of(run: Run, state: Run) -> Run:
    """The run with the arrays of another of its states."""
    return msgspec.structs.replace(
        run, version=state.version, weights=state.weights, moments=state.moments, gradients=state.gradients
    )


def lost(why: str) -> Gone:
    """What a client is told when arrays can't be had any more."""
    return Gone(
        "weights.lost",
        f"The arrays of this run are lost and can't be computed again: {why}.",
        fix="Create a training client from the last saved state, or roll back (gradserve checkpoints lists the steps).",
    )


def _update_to(state: Run) -> RunUpdate:
    return RunUpdate(state.id, state.version, state.weights, state.moments, state.gradients)


def _event(run: Run, kind: EventKind, detail: str) -> Event:
    return Event(time.time(), kind, detail, run.tenant, run.id)
