"""The in-memory hints between gateway and orchestration. Losing one costs a poll interval, never a result."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from gradserve.store.base import Checkpoint, Op, Version


@dataclass(frozen=True)
class NameVersion:
    """Give a run's state after ``version`` optimizer steps (None: the newest) a name; answered by the Checkpoint.

    ``purpose`` is the kind of the event that says so, if any.
    """

    tenant: str
    run_id: str
    version: int | None
    name: str
    ttl_seconds: int | None = None
    purpose: Literal["forked"] | None = None


@dataclass(frozen=True)
class Rollback:
    """Make an earlier state of a run its current one; answered by the Run."""

    tenant: str
    run_id: str
    version: int


@dataclass(frozen=True)
class CheckGraph:
    """Dry-run a stored graph; answered by nothing, or raised what is wrong with it."""

    digest: str


Role = Literal["weights", "optimizer moments", "client state"]
"""What an object of a kept state is."""


@dataclass(frozen=True)
class MakeWhole:
    """See to it that objects of a kept state are whole, as far as that can be done; answered by None when they are.

    ``name`` is the state's for people, ``version`` its step; ``roles`` says by digest what the objects are. ``tenant``
    is who wants to read it: a public checkpoint may be another's.
    """

    tenant: str
    name: str
    run_id: str
    version: int
    roles: dict[str, Role]

    @staticmethod
    def of(checkpoint: Checkpoint, tenant: str, *wanted: Role) -> MakeWhole:
        """Those of a checkpoint's objects that have a ``wanted`` role."""
        roles = {digest: role for digest, role in roles_of(checkpoint).items() if role in wanted}
        return MakeWhole(tenant, checkpoint.path, checkpoint.run_id, checkpoint.version, roles)


def roles_of(state: Checkpoint | Version) -> dict[str, Role]:
    """The objects of a kept state, by digest."""
    objects: list[tuple[str | None, Role]] = [(state.weights, "weights"), (state.moments, "optimizer moments")]
    if isinstance(state, Checkpoint):
        objects.append((state.client_state, "client state"))
    return {digest: role for digest, role in objects if digest is not None}


Ask = NameVersion | Rollback | MakeWhole | CheckGraph


class Wakeups:
    """Belongs to one event loop.

    The gateway calls ``submitted``, ``cancel``, ``ask``, ``is_coming``, ``waiter`` and ``wait``; orchestration
    ``take_submitted``, ``take_cancels``, ``take_asks`` and ``ended``.
    """

    def __init__(self) -> None:
        self._new: list[Op] = []
        self._cancels: list[tuple[Op, asyncio.Future[bool]]] = []
        self._asks: list[tuple[Ask, asyncio.Future[Any]]] = []
        self._arrived = asyncio.Event()
        self._closed = False
        self._coming: dict[str, str] = {}
        self._waiting: defaultdict[str, set[asyncio.Future[Op | None]]] = defaultdict(set)

    def submitted(self, op: Op) -> None:
        """An Op is in the journal (accepted or rejected: both may let its run go on)."""
        self._new.append(op)
        if op.state == "accepted":
            self._coming[op.id] = op.tenant
        self._arrived.set()

    def cancel(self, op: Op) -> asyncio.Future[bool]:
        """Ask for an Op to be stopped. The future says whether it will: then ``ended`` follows."""
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._closed:
            told.set_result(False)
            return told
        self._cancels.append((op, told))
        self._arrived.set()
        return told

    def take_cancels(self) -> list[tuple[Op, asyncio.Future[bool]]]:
        """What was asked by ``cancel`` since the last call. Take after ``take_submitted``: an Op is submitted first."""
        taken, self._cancels = self._cancels, []
        return taken

    def ask(self, what: Ask) -> asyncio.Future[Any]:
        """Ask for what is no Op. The future has the answer, or raises what the client must know."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asks.append((what, answer))
        self._arrived.set()
        return answer

    def take_asks(self) -> list[tuple[Ask, asyncio.Future[Any]]]:
        """What was asked by ``ask`` since the last call."""
        taken, self._asks = self._asks, []
        return taken

    async def take_submitted(self, timeout: float) -> list[Op]:
        """Wait for news, then return all Ops that arrived since the last call (maybe none)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._arrived.wait()
        self._arrived.clear()
        taken, self._new = self._new, []
        return taken

    def is_coming(self, tenant: str, op_id: str) -> bool:
        """Whether the tenant's Op was submitted here and ``ended`` is still to come, with its result."""
        return self._coming.get(op_id) == tenant

    def ended(self, op_id: str, outcome: Op | None = None) -> None:
        """The Op's result is in the store: wake everybody who waits for it, with the Op as stored if it is at hand."""
        self._coming.pop(op_id, None)
        for waiter in self._waiting.pop(op_id, ()):
            if not waiter.done():
                waiter.set_result(outcome)

    def release(self) -> None:
        """The server stops: nobody waits from now on, so that connections end in order instead of being cut."""
        self._closed = True
        for _, told in self.take_cancels():
            if not told.done():
                told.set_result(False)
        for op_id in list(self._waiting):
            self.ended(op_id)

    def waiter(self, op_id: str) -> asyncio.Future[Op | None]:
        """A future that ``ended`` completes; make it before looking into the store, so that nothing is missed.

        Hand it to :meth:`wait`, which also forgets it.
        """
        waiter: asyncio.Future[Op | None] = asyncio.get_running_loop().create_future()
        self._waiting[op_id].add(waiter)
        return waiter

    async def wait(self, op_id: str, waiter: asyncio.Future[Op | None], timeout: float) -> Op | None:
        """Wait for a future made by :meth:`waiter`; a timeout of 0 only forgets it.

        The ended Op without its body, or None: ask the store.
        """
        try:
            async with asyncio.timeout(0 if self._closed else timeout):
                return await waiter
        except TimeoutError:
            return None
        finally:
            waiting = self._waiting.get(op_id)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._waiting[op_id]
