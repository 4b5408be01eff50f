"""What runs Tasks: the interface that orchestration sees. One implementation so far: ``local``.

Contract (tests/contract/test_executor.py):

* ``run`` returns the Task's outcome or raises :class:`WorkerLost`; it never hangs after the worker is gone.
* A lost worker is replaced by itself; ``on_change`` is called whenever a worker comes or goes.
* ``cancel`` makes the worker forget a sample; its ``run`` then returns Failed ("cancelled"), unless it had just ended.
* A streamed sample's Progress is told on the event loop, in order, before its outcome; never after WorkerLost.
* Running a Task again elsewhere is always safe: Tasks are pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from gradserve.compute.tasks import Outcome, Progress, Task

ExitKind = Literal["signal", "out_of_memory", "exit", "silent", "stopped"]
WorkerPhase = Literal["starting", "ready", "down"]


class ExitReason(msgspec.Struct, frozen=True):
    """Why a worker ended. ``detail`` is a sentence for people."""

    kind: ExitKind
    detail: str
    exit_code: int | None = None
    peak_rss_bytes: int = 0


class WorkerState(msgspec.Struct, frozen=True):
    """A snapshot. ``restarts`` counts replacements since the executor started, ``failed_starts`` those of them that
    ended before they were ready, since one was.
    """

    id: str
    phase: WorkerPhase
    pid: int | None
    restarts: int
    peak_rss_bytes: int
    last_exit: ExitReason | None = None
    failed_starts: int = 0


class WorkerLost(Exception):
    """The worker died with the Task in its hands; nothing of the Task counts."""

    def __init__(self, worker_id: str, reason: ExitReason) -> None:
        super().__init__(f"worker {worker_id} was lost: {reason.detail}")
        self.worker_id = worker_id
        self.reason = reason


class Executor(Protocol):
    """Starts, watches and stops workers. Belongs to one event loop."""

    on_change: Callable[[], None]

    async def start(self) -> None:
        """Begin to start workers; returns before they are ready."""
        ...

    async def close(self) -> None:
        """Stop all workers; Tasks in flight raise WorkerLost ("stopped")."""
        ...

    def workers(self) -> list[WorkerState]: ...

    async def run(self, worker_id: str, task: Task, on_progress: Callable[[Progress], None] | None = None) -> Outcome:
        """Run a Task on a ready worker. Tasks of one worker may overlap (sampling is batched inside)."""
        ...

    def cancel(self, worker_id: str, task_id: str) -> None:
        """Tell the worker to forget a sample that it was given; does not wait. One that it does not have is fine."""
        ...
