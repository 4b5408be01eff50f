"""Which earlier state of a run is good, when a kept one is not."""

from __future__ import annotations

import asyncio

from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.store.base import Checkpoint, Store, Version
from gradserve.store.wakeups import MakeWhole, Role, roles_of

_PAGE = 1000


async def advice(store: Store, objects: ObjectStore, bad: MakeWhole) -> str:
    """How to go on, when ``bad`` can't be had: from the next older state that was read and is good, if there is one."""
    found = await older_good(store, objects, bad)
    if found is None:
        return "No older version or checkpoint of the run is left that is good."
    if isinstance(found, Checkpoint):
        return f"The next older good one is {found.path} (step {found.version})."
    step, run_id = found.version, found.run_id
    return f"The next older good one is step {step}: gradserve rollback {run_id} --to {step}"


async def older_good(store: Store, objects: ObjectStore, bad: MakeWhole) -> Checkpoint | Version | None:
    """The newest kept state of the run, of the tenant's own, that is of that step or an earlier one, has what is wanted
    and whose objects have their digests.
    """
    for state in await _candidates(store, bad):
        if all(_has(state, role) for role in bad.roles.values()) and await asyncio.to_thread(_is_whole, objects, state):
            return state
    return None


async def _candidates(store: Store, bad: MakeWhole) -> list[Checkpoint | Version]:
    """The newest first; of the same step one that has a name before one that has none."""
    checkpoints, _ = await store.list_checkpoints(bad.tenant, bad.run_id, _PAGE, 0)
    states: list[Checkpoint | Version] = [*checkpoints, *await store.list_versions(bad.tenant, bad.run_id)]
    older = [state for state in states if state.version <= bad.version]
    return sorted(older, key=lambda state: (state.version, isinstance(state, Checkpoint), state.created_at))[::-1]


def _has(state: Checkpoint | Version, role: Role) -> bool:
    match role:
        case "weights":
            return True
        case "optimizer moments":  # before the first step there are none, and none are missing
            return isinstance(state, Version) or state.kind == "weights"
        case "client state":
            return isinstance(state, Checkpoint) and state.client_state is not None


def _is_whole(objects: ObjectStore, state: Checkpoint | Version) -> bool:
    try:
        for digest in roles_of(state):
            objects.verified_path(digest)
    except (ObjectMissing, ObjectCorrupt):
        return False
    return True
