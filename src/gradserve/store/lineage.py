"""Where weights come from: read by the gateway and by the CLI."""

from __future__ import annotations

import msgspec

from gradserve.store.base import Event, Run, Store

_KINDS = ("loaded", "rolled_back", "forked")
_MANY = 1000


class Ancestor(msgspec.Struct, frozen=True):
    """A run in a line of descent. ``path`` is the checkpoint through which the next one began; None: the run itself."""

    run_id: str
    base: str
    version: int
    path: str | None
    known: bool = True


class Lineage(msgspec.Struct, frozen=True):
    """``ancestors`` from the run itself back to the one that began with the base; ``turns`` oldest first."""

    ancestors: list[Ancestor]
    children: list[str]
    turns: list[Event]


async def lineage_of(store: Store, tenant: str, run: Run) -> Lineage:
    """The line of a run. A parent that is another tenant's (a published checkpoint) is named, not looked into."""
    line = [Ancestor(run.id, run.base, run.version, None)]
    parent = run.parent
    while parent is not None and len(line) < _MANY:
        run_id = parent.removeprefix("tinker://").split("/")[0]
        found = await store.get_run(tenant, run_id)
        if found is None:
            line.append(Ancestor(run_id, run.base, 0, parent, known=False))
            break
        line.append(Ancestor(found.id, found.base, found.version, parent))
        parent = found.parent
    events, _ = await store.list_events(tenant, run.id, _MANY, 0)
    turns = [event for event in reversed(events) if event.kind in _KINDS]
    return Lineage(line, await _children(store, tenant, run), turns)


async def _children(store: Store, tenant: str, run: Run) -> list[str]:
    children: list[str] = []
    offset = 0
    while True:
        runs, page = await store.list_runs(tenant, _MANY, offset)
        children += [r.id for r in runs if r.parent is not None and r.parent.startswith(f"tinker://{run.id}/")]
        offset += len(runs)
        if not runs or offset >= page.total:
            return children
