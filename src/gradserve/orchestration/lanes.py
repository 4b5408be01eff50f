"""A lane is a run's queue: accept out of order, execute in order.

Invariant: an Op that changes the run (a *barrier*) executes alone, after everything before it has ended; Ops that
only read the weights (forward, forward_backward) may execute side by side between two barriers. A gap in the
sequence holds back everything after it (the client sends the first chunk of a call last).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from gradserve.store.base import Op, Run
from gradserve.wire.errors import ServerError

_READERS = frozenset({"forward_backward", "apply_graph", "evaluate"})


@dataclass
class Lane:
    """``head`` is the lowest seq that has not ended. ``run`` is the newest state, maybe not yet committed.

    ``touched_at`` is when something last arrived or ended (time.monotonic). Nothing starts unless ``resumed`` is set:
    the run's state is being made. Ends are written under ``committing``, one after another. ``uncovered_ms`` is what
    the Ops since the last optimizer step cost. ``lost`` says why the run's arrays can't be had any more, ``postponed``
    what kept them from being computed again for now.
    """

    run: Run
    head: int
    waiting: dict[int, Op] = field(default_factory=dict)
    running: dict[int, Op] = field(default_factory=dict)
    touched_at: float = field(default_factory=time.monotonic)
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    committing: asyncio.Lock = field(default_factory=asyncio.Lock)
    uncovered_ms: float = 0.0
    lost: str | None = None
    postponed: ServerError | None = None
    _ended_ahead: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.resumed.set()

    def add(self, op: Op) -> None:
        """A newly accepted Op, or a rejected one (whose seq is only consumed)."""
        self.touched_at = time.monotonic()
        if op.state != "accepted":
            self.end(op.seq)
        elif op.seq >= self.head and op.seq not in self.running and op.seq not in self._ended_ahead:
            self.waiting[op.seq] = op

    def start_ready(self) -> list[Op]:
        """Move every Op that may run now from waiting to running, in seq order."""
        started: list[Op] = []
        if not self.resumed.is_set():
            return started
        seq = self.head
        while True:
            if seq in self._ended_ahead or (seq in self.running and self.running[seq].kind in _READERS):
                seq += 1
                continue
            op = self.waiting.get(seq)
            if op is None:
                break
            barrier = op.kind not in _READERS
            if barrier and (self.running or seq != self.head):
                break
            self.running[seq] = self.waiting.pop(seq)
            started.append(op)
            if barrier:
                break
            seq += 1
        return started

    def withdraw(self, seq: int) -> bool:
        """Take back an Op that waits; its seq holds later ones back until ``end``. False when it does not wait."""
        return self.waiting.pop(seq, None) is not None

    def end(self, seq: int) -> None:
        """The Op of this seq has ended (or was rejected): move the head over all that have."""
        self.touched_at = time.monotonic()
        self.running.pop(seq, None)
        self.waiting.pop(seq, None)
        if seq >= self.head:
            self._ended_ahead.add(seq)
        while self.head in self._ended_ahead:
            self._ended_ahead.remove(self.head)
            self.head += 1

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.waiting and not self.running and self.resumed.is_set()
