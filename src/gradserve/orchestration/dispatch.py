"""Hands Tasks to workers that have room.

Each client (a run, or a sampling session) has a queue; free places go round the queues, so that nobody starves
behind a neighbour's thousand requests. Small training Tasks are handed out ahead of time, for the worker to compute
together. A Task whose worker is lost goes back to the front of its queue, until its attempts are used up; from then on
it is a suspect, which meets no other training Task in a worker and is blamed alone if that one dies too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from gradserve.compute.executor import Executor, WorkerLost, WorkerState
from gradserve.compute.tasks import GradTask, Outcome, SampleTask, ScoreTask, Task
from gradserve.orchestration.streams import TokenStream
from gradserve.wire.errors import ServerError

log = logging.getLogger(__name__)

_TRAIN_TASKS_PER_WORKER = 2
"""One computing and one waiting in the worker, so that it never idles for a round trip; small ones may be more."""
_TOKENS_OF_OTHERS = 64
"""What a Task that has no rows (an optimizer step, say) counts as: a guess, so that such Tasks are bounded too."""
_FAILED_STARTS = 5
"""Of every worker, in a row (about two seconds): what waits is told of it instead of waiting for ever."""
_SAMPLES_PER_WORKER = 512
"""Sequences in a worker's hands; more wait here, where another worker can take them."""


class AttemptsExhausted(Exception):
    """Every worker that took the Task died. ``__cause__`` is the last WorkerLost."""


class NoWorkers(ServerError):
    """No worker is alive, and all that were started of late died before they were ready. The Task was not begun."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "compute.no_workers",
            f"No worker can start, so the request was not computed and is not billed; the last one {why}.",
            fix="Nothing of the run is lost. When the server's workers start again (healthz), send the request again.",
        )


class TaskCancelled(Exception):
    """The Task was withdrawn by :meth:`Dispatcher.cancel`."""


@dataclass(eq=False)
class _Entry:
    task: Task
    queue: str
    future: asyncio.Future[Outcome]
    stream: TokenStream | None
    attempts: int = 0
    worker: str | None = None
    loss: WorkerLost | None = None
    lost_at: float = 0.0

    @property
    def samples(self) -> int:
        return self.task.op.num_samples if isinstance(self.task, SampleTask) else 0

    @cached_property
    def tokens(self) -> int:
        if self.samples:
            return 0
        return self.task.tokens if isinstance(self.task, GradTask | ScoreTask) else _TOKENS_OF_OTHERS


@dataclass
class _Load:
    train: int = 0
    tokens: int = 0
    samples: int = 0
    suspect: _Entry | None = None

    def room_for(self, entry: _Entry, merge_tokens: int) -> bool:
        if entry.samples:
            return self.samples == 0 or self.samples + entry.samples <= _SAMPLES_PER_WORKER
        if self.suspect or entry.attempts:
            return self.train == 0
        # The worker computes small Tasks together: besides the pass that it is at it may hold the Tasks of the next.
        return self.train < _TRAIN_TASKS_PER_WORKER or self.tokens + entry.tokens <= 2 * merge_tokens

    def add(self, entry: _Entry, sign: int = 1) -> None:
        self.train += sign * (entry.samples == 0)
        self.tokens += sign * entry.tokens
        self.samples += sign * entry.samples


@dataclass
class Dispatcher:
    """Belongs to one event loop.

    ``attempts`` is how many worker deaths a Task survives; ``merge_tokens`` how many tokens of training Tasks a worker
    computes together. ``on_moved`` hears of a Task of a queue that a second worker has got, so many seconds after the
    first was lost.
    """

    executor: Executor
    attempts: int
    merge_tokens: int = 512
    on_moved: Callable[[Task, str, WorkerLost, float], None] = lambda *_: None
    _queues: dict[str, deque[_Entry]] = field(default_factory=dict)
    _loads: dict[str, _Load] = field(default_factory=dict)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    lost: Counter[str] = field(default_factory=Counter)
    _entries: dict[str, _Entry] = field(default_factory=dict)

    async def run(self, task: Task, queue: str, stream: TokenStream | None = None) -> Outcome:
        """Queue a Task and wait for its outcome; a streamed sample's tokens go to ``stream`` before.

        Raises AttemptsExhausted, NoWorkers, TaskCancelled.
        """
        entry = _Entry(task, queue, asyncio.get_running_loop().create_future(), stream)
        self._entries[task.id] = entry
        self._queues.setdefault(queue, deque()).append(entry)
        self.pump()
        try:
            return await entry.future
        finally:
            del self._entries[task.id]

    def cancel(self, task_id: str) -> None:
        """Withdraw a sample: a queued one never runs, a running one is forgotten by its worker. Not waiting is fine."""
        entry = self._entries.get(task_id)
        if entry is None or entry.future.done():
            return
        entry.future.set_exception(TaskCancelled(task_id))
        if entry.worker is not None:
            self.executor.cancel(entry.worker, task_id)  # its place is free when the worker says so
        else:
            self._remove(entry)
            self.pump()  # it may have stood before one that finds room

    def pump(self) -> None:
        """Give every free place to the next Task. Called whenever a Task, a place or a worker becomes free."""
        workers = self.executor.workers()
        if (why := _why_none_starts(workers)) is not None:
            self._give_up(why)
            return
        ready = [worker.id for worker in workers if worker.phase == "ready"]
        while True:
            placed = False
            for name in list(self._queues):
                worker = self._place_for(self._queues[name][0], ready)
                if worker is not None:
                    self._start(self._take(name), worker)
                    placed = True
            if not placed:
                return

    def _give_up(self, why: str) -> None:
        """Nothing that is queued can be computed now."""
        queues, self._queues = self._queues, {}
        for entry in (entry for queue in queues.values() for entry in queue):
            if not entry.future.done():
                entry.future.set_exception(NoWorkers(why))

    async def close(self) -> None:
        """Drop what is queued; whoever waits is cancelled."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for queue in self._queues.values():
            for entry in queue:
                entry.future.cancel()
        self._queues.clear()

    def _place_for(self, entry: _Entry, ready: list[str]) -> str | None:
        """The ready worker with room that has the least to do."""
        loads = {worker: self._loads.setdefault(worker, _Load()) for worker in ready}
        open_to_it = [worker for worker in ready if loads[worker].room_for(entry, self.merge_tokens)]
        return min(open_to_it, key=lambda worker: (loads[worker].tokens, loads[worker].samples), default=None)

    def _take(self, name: str) -> _Entry:
        """The first entry of a queue, which then goes to the end of the round."""
        queue = self._queues.pop(name)
        entry = queue.popleft()
        if queue:
            self._queues[name] = queue
        return entry

    def _remove(self, entry: _Entry) -> None:
        """Take an entry out of the middle of its queue."""
        queue = self._queues[entry.queue]
        queue.remove(entry)
        if not queue:
            del self._queues[entry.queue]

    def _start(self, entry: _Entry, worker: str) -> None:
        entry.worker = worker
        if entry.loss is not None:
            self.on_moved(entry.task, entry.queue, entry.loss, time.monotonic() - entry.lost_at)
            entry.loss = None
        load = self._loads[worker]
        load.add(entry)
        if entry.attempts and not entry.samples:
            load.suspect = entry
        running = asyncio.create_task(self._finish(entry, worker, load))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _finish(self, entry: _Entry, worker: str, load: _Load) -> None:
        try:
            on_progress = None if entry.stream is None else entry.stream.attempt()
            outcome = await self.executor.run(worker, entry.task, on_progress)
        except WorkerLost as loss:
            if self._loads.get(worker) is load:
                del self._loads[worker]  # its successor has nothing in hand; this one still names the suspect
            self._lost(entry, loss, blamed=load.suspect in (None, entry))
        else:
            load.add(entry, -1)
            if load.suspect is entry:
                load.suspect = None
            if not entry.future.done():
                entry.future.set_result(outcome)
        finally:
            self.pump()

    def _lost(self, entry: _Entry, loss: WorkerLost, blamed: bool) -> None:
        entry.worker = None
        if entry.future.done():
            return  # cancelled meanwhile
        if loss.reason.kind == "stopped":
            entry.future.cancel()
            return
        entry.attempts += blamed
        entry.loss, entry.lost_at = loss, time.monotonic()
        self.lost[loss.worker_id] += 1
        log.warning("task %s, attempt %d: %s", entry.task.id, entry.attempts, loss)
        if entry.attempts >= self.attempts:
            exhausted = AttemptsExhausted(str(loss))
            exhausted.__cause__ = loss
            entry.future.set_exception(exhausted)
        else:
            self._queues.setdefault(entry.queue, deque()).appendleft(entry)


def _why_none_starts(workers: list[WorkerState]) -> str | None:
    """What ended the last worker that tried, when none is alive and they have tried for long."""
    if not workers or any(worker.phase == "ready" or worker.failed_starts < _FAILED_STARTS for worker in workers):
        return None
    exits = [worker.last_exit.detail for worker in workers if worker.last_exit is not None]
    return exits[-1] if exits else "said nothing"
