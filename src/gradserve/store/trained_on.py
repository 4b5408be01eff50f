"""What base model kept weights belong to: that of their run, or of the import that made them."""

from __future__ import annotations

from gradserve.store.base import Checkpoint, SamplingSession, Store
from gradserve.wire.identity import BaseIdentity


async def of_checkpoint(store: Store, checkpoint: Checkpoint) -> BaseIdentity | None:
    """None where it was not noted."""
    run = await store.get_run(None, checkpoint.run_id)
    return BaseIdentity.of_metadata(checkpoint.user_metadata) if run is None else run.trained_on


async def of_sampler(store: Store, sampler: SamplingSession) -> BaseIdentity | None:
    """The same for the weights of a sampling session. None also for the base alone, whichever is offered."""
    if sampler.run_id is None:
        return None
    run = await store.get_run(None, sampler.run_id)
    if run is not None or sampler.model_path is None:
        return None if run is None else run.trained_on
    run_id, kind, name = sampler.model_path.removeprefix("tinker://").split("/")
    checkpoint = await store.get_checkpoint(None, run_id, kind, name)
    return None if checkpoint is None else BaseIdentity.of_metadata(checkpoint.user_metadata)
