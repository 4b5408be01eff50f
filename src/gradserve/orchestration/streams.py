"""The tokens of a sample while it is being sampled, for consumers inside the server.

Invariant: a consumer gets every token of every sequence once and in order, however many workers die meanwhile. A Task
that runs again gives the same tokens from its start; those that were delivered already are left out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import msgspec

from gradserve.compute.tasks import Progress

_ITEM_BYTES = 4
"""A token is an int32, a log-prob a float32."""


class TokenStream:
    """An async iterator of new tokens; it ends with :meth:`close`. One consumer; belongs to one event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._delivered: Counter[int] = Counter()

    def attempt(self) -> Callable[[Progress], None]:
        """Where one run of the Task reports its tokens, from the first one on."""
        seen: Counter[int] = Counter()

        def take(progress: Progress) -> None:
            seen[progress.index] += len(progress.tokens) // _ITEM_BYTES
            self._deliver(progress, seen[progress.index] - self._delivered[progress.index])

        return take

    def close(self) -> None:
        """Nothing follows. What was reported is still delivered."""
        self._queue.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[Progress]:
        return self

    async def __anext__(self) -> Progress:
        progress = await self._queue.get()
        if progress is None:
            self.close()  # for whoever asks again
            raise StopAsyncIteration
        return progress

    def _deliver(self, progress: Progress, new: int) -> None:
        """The last ``new`` tokens of a report, if there are any."""
        if new <= 0:
            return
        self._delivered[progress.index] += new
        tail = -new * _ITEM_BYTES
        fresh = msgspec.structs.replace(progress, tokens=progress.tokens[tail:], logprobs=progress.logprobs[tail:])
        self._queue.put_nowait(fresh)
