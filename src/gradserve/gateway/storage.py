"""What a run keeps on disk, and what that costs by the price sheet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gradserve.compute.objects import ObjectMissing, ObjectStore
from gradserve.gateway.call import Call
from gradserve.store.base import Checkpoint, Run
from gradserve.store.summary import Stored
from gradserve.store.wakeups import roles_of

_PAGE = 1000


async def stored_of(call: Call, run: Run) -> Stored:
    """The objects of a run's checkpoints and durable versions; states that share one store it once."""
    digests = {digest for checkpoint in await _checkpoints(call, run) for digest in roles_of(checkpoint)}
    for version in await call.store.list_versions(call.tenant, run.id):
        digests |= roles_of(version).keys()
    sizes = await asyncio.to_thread(_sizes, call.gateway.objects, digests)
    prices = call.gateway.settings.prices.of(run.base)
    return Stored(len(sizes), sum(sizes), prices.storage_gib_month, prices.storage(sum(sizes)))


async def _checkpoints(call: Call, run: Run) -> list[Checkpoint]:
    found, page = await call.store.list_checkpoints(call.tenant, run.id, _PAGE, 0)
    while len(found) < page.total:
        more, page = await call.store.list_checkpoints(call.tenant, run.id, _PAGE, len(found))
        if not more:
            break
        found += more
    return found


def _sizes(objects: ObjectStore, digests: Iterable[str]) -> list[int]:
    """Bytes of those that are there."""
    sizes = []
    for digest in digests:
        try:
            sizes.append(objects.size(digest))
        except ObjectMissing:
            continue
    return sizes
