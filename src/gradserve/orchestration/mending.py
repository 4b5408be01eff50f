"""Kept states whose files turn out to be damaged: computed again where the journal can, else an older one is named.

A state is read through here before anything is made of it, so that a flipped bit ends in the same bytes as before or in
an error that says which file it is and where to go on from.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.orchestration.held import Held
from gradserve.orchestration.older import advice
from gradserve.orchestration.replay import Replay, Replayed, Unrecoverable
from gradserve.store.base import Checkpoint, Event, Run, Store, Version
from gradserve.store.wakeups import MakeWhole
from gradserve.wire.errors import ServerError

log = logging.getLogger(__name__)

_RESULTS_OF_OPS = ("steps", "age", "replay", "save")
"""Causes of versions that the Ops up to their seq lead to."""


@dataclass
class _Faults:
    """Digest to what is wrong with the object's file."""

    damaged: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def all(self) -> dict[str, str]:
        return self.damaged | self.missing


class Aside:
    """Damaged files, out of the way while their objects are made again: one that is there would not be written."""

    def __init__(self, objects: ObjectStore, digests: Iterable[str]) -> None:
        self._files = [file for file in map(objects.set_aside, digests) if file is not None]

    def put_back(self) -> None:
        """They were not made: what is left of them, one bit may be wrong, is not thrown away."""
        for file in self._files:
            file.put_back()

    def remove(self) -> None:
        """They were made."""
        for file in self._files:
            file.remove()


class Mending:
    """Mends one state at a time. What it computes again is billed to nobody."""

    def __init__(
        self, store: Store, objects: ObjectStore, folders: CheckpointFolders, replay: Replay, held: Held
    ) -> None:
        self._store = store
        self._objects = objects
        self._folders = folders
        self._replay = replay
        self._held = held
        self._one_at_a_time = asyncio.Lock()

    async def make_whole(self, kept: MakeWhole) -> None:
        """See to it that the objects of ``kept`` are whole, in the local tiers.

        Raises NoRoom, or ServerError (checkpoint.corrupt, checkpoint.lost) that names the file and the next older good
        state.
        """
        if not (await asyncio.to_thread(self._faults, kept)).all():
            await self.keep_again(kept.run_id, set(kept.roles))  # the archive may just have given one
            return
        async with self._one_at_a_time:
            faults = await asyncio.to_thread(self._faults, kept)
            if faults.all():
                await self._mend(kept, faults)

    async def keep_again(self, run_id: str, digests: set[str]) -> None:
        """Make durable, and link in the folders, what was computed again and is part of a kept state of the run.

        Raises NoRoom.
        """
        checkpoints = await self._checkpoints(run_id)
        states: list[Checkpoint | Version] = [*checkpoints, *await self._store.list_versions(None, run_id)]
        for state in states:
            for digest in {state.weights, state.moments} & digests:
                assert digest is not None
                await asyncio.to_thread(self._objects.persist, digest)
        for checkpoint in checkpoints:
            await asyncio.to_thread(relink, self._folders, checkpoint)

    def _faults(self, kept: MakeWhole) -> _Faults:
        found = _Faults()
        for digest, role in kept.roles.items():
            try:
                self._objects.verified_path(digest)
            except ObjectCorrupt as error:
                log.error("%s: %s", kept.name, error)
                found.damaged[digest] = (
                    f"{_short(error.file)} (the {role} of {kept.name}) is damaged: its bytes have another SHA-256"
                )
            except ObjectMissing:
                found.missing[digest] = f"objects/{digest}.safetensors (the {role} of {kept.name}) is missing"
        return found

    async def _mend(self, kept: MakeWhole, faults: _Faults) -> None:
        with self._held.during() as held:
            aside = Aside(self._objects, faults.damaged)
            try:
                run, replayed = await self._again(kept, held)
                await self.keep_again(kept.run_id, set(faults.all()))
            except BaseException as error:
                aside.put_back()
                if not isinstance(error, Unrecoverable):
                    raise
                raise await self._hopeless(kept, faults, str(error)) from error
            aside.remove()
        what = f"{'; '.join(faults.all().values())}; computed again from {replayed.origin}, not billed"
        log.warning("%s", what)
        await self._store.add_event(Event(time.time(), "recovered", what, run.tenant, run.id))

    async def _again(self, kept: MakeWhole, held: list[str]) -> tuple[Run, Replayed]:
        """Compute the state again, to the same digests. Raises Unrecoverable."""
        if "client state" in kept.roles.values():
            raise Unrecoverable("it came from the client")
        run = await self._store.get_run(None, kept.run_id)
        if run is None:
            raise Unrecoverable("it was imported, and there is no run to compute it from")
        versions = await self._store.list_versions(None, kept.run_id)
        seq = _seq_of(kept, versions)
        replayed = await (
            self._replay.to_version(run, kept.version, held) if seq is None else self._replay.to_seq(run, seq, held)
        )
        made = {replayed.run.weights, replayed.run.moments}
        if not made.issuperset(kept.roles):
            raise Unrecoverable("computing it again gave other last bits")
        return run, replayed

    async def _hopeless(self, kept: MakeWhole, faults: _Faults, why: str) -> ServerError:
        """What is told of a state that can't be had again."""
        fix = await advice(self._store, self._objects, kept)
        if {kept.roles[digest] for digest in faults.all()} == {"optimizer moments"}:
            fix = f"The weights of {kept.name} are good: load it without optimizer moments. {fix}"
        code = "checkpoint.corrupt" if faults.damaged else "checkpoint.lost"
        return ServerError(code, f"{'; '.join(faults.all().values())}; it can't be computed again ({why}).", fix=fix)

    async def _checkpoints(self, run_id: str) -> list[Checkpoint]:
        found, _ = await self._store.list_checkpoints(None, run_id, 1000, 0)
        return found


def relink(folders: CheckpointFolders, checkpoint: Checkpoint) -> None:
    """See to it that a checkpoint's folder has the objects' own files, not damaged ones that were replaced."""
    folders.relink(
        checkpoint.run_id,
        checkpoint.kind,
        checkpoint.name,
        checkpoint.lora,
        checkpoint.weights,
        checkpoint.moments,
    )


def _seq_of(kept: MakeWhole, versions: list[Version]) -> int | None:
    """The Op after which the run was in this state: safer than its step, which a rollback may have made twice."""
    same = (v.seq for v in versions if v.weights in kept.roles and v.cause in _RESULTS_OF_OPS)
    return next(same, None)


def _short(file: Path | str) -> str:
    """A file's place within the server's own directories; where those are is nobody else's business."""
    return file if isinstance(file, str) else f"{file.parent.name}/{file.name}"
