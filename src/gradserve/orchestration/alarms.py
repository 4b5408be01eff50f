"""What is wrong with the server right now, for healthz and the log; each alarm is an event when it begins and ends."""

from __future__ import annotations

import logging
import time

from gradserve.store.base import Event, Store, StoreError

log = logging.getLogger(__name__)


class Alarms:
    """One sentence for each thing that is wrong, by name."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.active: dict[str, str] = {}

    async def raise_(self, name: str, detail: str) -> None:
        """Something is wrong. Said once, until it is cleared."""
        known = name in self.active
        self.active[name] = detail
        if not known:
            log.error("ALARM %s: %s", name, detail)
            await self._tell(Event(time.time(), "storage_alarm", detail))

    async def clear(self, name: str) -> None:
        """It is well again; fine when it was."""
        detail = self.active.pop(name, None)
        if detail is not None:
            log.warning("alarm over: %s", name)
            await self._tell(Event(time.time(), "storage_well", f"over: {detail}"))

    async def _tell(self, event: Event) -> None:
        try:
            await self._store.add_event(event)
        except StoreError as error:  # the alarm may be about this very store
            log.error("the event could not be written: %s", error)
