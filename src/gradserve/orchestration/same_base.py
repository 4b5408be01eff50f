"""Keeps Ops that an earlier server accepted from being computed with another base model of the same name.

The gateway refuses such requests as they come; here it is about those that were in the journal when this server
started, and about arrays that would be computed again.
"""

from __future__ import annotations

import logging
import time

from gradserve.compute.catalog import Catalog
from gradserve.store import trained_on
from gradserve.store.base import Event, Op, Run, Store
from gradserve.wire.errors import Invalid
from gradserve.wire.identity import require_same_base
from gradserve.wire.ops import Sample

log = logging.getLogger(__name__)


class SameBase:
    """``samplers`` whose weights fit are looked up once: neither they nor the catalog change."""

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._samplers: set[str] = set()

    async def require_of_run(self, run: Run) -> None:
        """Raises Invalid when the run was trained on another model than is offered."""
        require_same_base(run.id, run.base, run.trained_on, await self._catalog.identity(run.base))

    async def require_of_sample(self, op: Op, sample: Sample) -> None:
        """The same for the weights that a sample is drawn from."""
        if sample.weights is None or op.scope in self._samplers:
            return
        sampler = await self._store.get_sampling_session(None, op.scope)
        known = None if sampler is None else await trained_on.of_sampler(self._store, sampler)
        require_same_base(op.scope, sample.base, known, await self._catalog.identity(sample.base))
        self._samplers.add(op.scope)

    async def wakes(self, run: Run) -> bool:
        """Whether a run that slept may go on; an event of the run says what is different."""
        try:
            await self.require_of_run(run)
        except Invalid as differs:
            await self._tell(run, differs.detail)
            return False
        known, served = run.trained_on, await self._catalog.identity(run.base)
        if known is not None and served is not None and known.tokenizer != served.tokenizer:
            await self._tell(run, f"{run.id} goes on with other tokenizer files of {run.base!r} than it began with")
        return True

    async def _tell(self, run: Run, what: str) -> None:
        log.warning("%s", what)
        await self._store.add_event(Event(time.time(), "base_differs", what, run.tenant, run.id))
