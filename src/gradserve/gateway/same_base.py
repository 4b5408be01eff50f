"""Weights are only used with the base model that they were trained on, whatever else bears its name."""

from __future__ import annotations

from gradserve.gateway.call import Call
from gradserve.store import trained_on
from gradserve.store.base import Checkpoint, Run, SamplingSession
from gradserve.wire.identity import require_same_base


async def identity_metadata(call: Call, base: str) -> dict[str, str]:
    """What is noted of ``base`` with a new run, or with imported weights."""
    identity = await call.gateway.catalog.identity(base)
    return {} if identity is None else identity.as_metadata()


async def require_base_of_run(call: Call, run: Run) -> None:
    """Raises Invalid when another model is offered under the name of the run's base."""
    require_same_base(run.id, run.base, run.trained_on, await call.gateway.catalog.identity(run.base))


async def require_base_of_checkpoint(call: Call, checkpoint: Checkpoint) -> None:
    """The same for a checkpoint."""
    known = await trained_on.of_checkpoint(call.store, checkpoint)
    require_same_base(checkpoint.path, checkpoint.base, known, await call.gateway.catalog.identity(checkpoint.base))


async def require_base_of_sampler(call: Call, sampler: SamplingSession) -> None:
    """The same for the weights of a sampling session."""
    known = await trained_on.of_sampler(call.store, sampler)
    name = sampler.model_path or sampler.run_id or sampler.id
    require_same_base(name, sampler.base, known, await call.gateway.catalog.identity(sampler.base))
