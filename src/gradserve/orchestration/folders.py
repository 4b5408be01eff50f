"""The readable folders of checkpoints, made again where they are gone: lost, or the database came from an archive."""

from __future__ import annotations

import asyncio
import logging

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.checkpoints import CheckpointFolders
from gradserve.compute.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from gradserve.orchestration.recovery import write_folder
from gradserve.store.base import Checkpoint, Store

log = logging.getLogger(__name__)

_PAGE = 1000


async def rebuild_missing(store: Store, objects: ObjectStore, folders: CheckpointFolders) -> None:
    """Write the folders that checkpoints lack, as far as their arrays are on this machine; what fails is logged."""
    for checkpoint in await _all(store):
        arrays = [digest for digest in (checkpoint.weights, checkpoint.moments) if digest is not None]
        there = all(objects.has_durable(digest) for digest in arrays)
        if not there or folders.has(checkpoint.run_id, checkpoint.kind, checkpoint.name):
            continue
        try:
            await asyncio.to_thread(write_folder, folders, checkpoint)
        except (OSError, ModelUnusable, ObjectMissing, ObjectCorrupt) as error:
            log.error("the folder of %s could not be made again: %s", checkpoint.path, error)


async def _all(store: Store) -> list[Checkpoint]:
    found: list[Checkpoint] = []
    while True:
        some, page = await store.list_checkpoints(None, None, _PAGE, len(found))
        found += some
        if not some or len(found) >= page.total:
            return found
