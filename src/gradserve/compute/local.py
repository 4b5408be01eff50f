"""The executor of one machine: worker processes, forked from a zygote that has torch imported and the models loaded.

A fork is ready in tenths of a second, so a killed worker is back before its clients notice. Each worker has one pipe; a
thread here reads it and a thread writes it, so that the event loop never blocks.

A worker holds its place as long as it gives signs of life. One that does not is killed and replaced at once, dead or
not: nothing that arrives from a process counts unless it is the one that holds the place (the fencing token is the
number of its incarnation, bound to its pipe), its pipe is cut, and what it may still write are whole objects named by
their content.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import msgspec

from gradserve.compute.executor import ExitReason, WorkerLost, WorkerPhase, WorkerState
from gradserve.compute.tasks import (
    Cancel,
    Done,
    Failed,
    FromWorker,
    LastWords,
    Outcome,
    Ping,
    Pong,
    Progress,
    Ready,
    Task,
    ToWorker,
    WorkerSpec,
)
from gradserve.compute.zygote.handle import Birth, CannotFork, Zygote, home

if TYPE_CHECKING:
    _Pipe: TypeAlias = Connection[Any, Any]
else:  # generic only for type checkers
    _Pipe = Connection

OnProgress: TypeAlias = Callable[[Progress], None]

log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromWorker)

_PING_EVERY_S = 5.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 30.0
_EXIT_CODE_S = 5.0
"""How long the exit code of a worker whose pipe has closed is waited for; it comes a moment later."""


class Nursery(Protocol):
    """Where processes come from; a Zygote, but for tests."""

    async def fork(self, spec: WorkerSpec) -> Birth:
        """A new worker. Raises CannotFork."""
        ...

    async def close(self) -> None:
        """Nothing is wanted any more."""
        ...


class _InFlight(NamedTuple):
    """A Task in a worker's hands, and who hears of it."""

    outcome: asyncio.Future[Outcome]
    on_progress: OnProgress | None


class LocalExecutor:
    """Keeps one process alive per spec. All specs name the same object store."""

    def __init__(self, specs: list[WorkerSpec], silence_s: float = 60.0, nursery: Nursery | None = None) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._nursery = nursery or Zygote(home(Path(specs[0].objects)))
        self._workers = {spec.id: _Worker(spec, silence_s, self._nursery, self._changed) for spec in specs}
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to start the workers; see Executor."""
        self._keepers = [asyncio.create_task(worker.keep_alive()) for worker in self._workers.values()]

    async def close(self) -> None:
        """Stop the workers; see Executor."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for worker in self._workers.values():
            await worker.stop()
        await self._nursery.close()

    def workers(self) -> list[WorkerState]:
        """Snapshots of all workers."""
        return [worker.state() for worker in self._workers.values()]

    async def run(self, worker_id: str, task: Task, on_progress: OnProgress | None = None) -> Outcome:
        """Run a Task on a ready worker; see Executor."""
        return await self._workers[worker_id].run(task, on_progress)

    def cancel(self, worker_id: str, task_id: str) -> None:
        """Tell the worker to forget a sample; see Executor."""
        self._workers[worker_id].cancel(task_id)

    def _changed(self) -> None:
        self.on_change()


class _Incarnation:
    """One process in a place, with its pipe. ``number`` counts the processes of that place."""

    def __init__(self, number: int, birth: Birth, name: str, hear: Callable[[int, FromWorker], None]) -> None:
        self.number = number
        self.pid = birth.pid
        self.ended = birth.ended
        self.lost = asyncio.Event()
        self.last_words: str | None = None
        self.peak_rss_bytes = 0
        self.ready = self.silent = False
        self.heard_at = time.monotonic()
        self.oom_kills_before = _oom_kills()
        self._hear = hear
        self._socket = birth.pipe
        self._pipe: _Pipe = Connection(os.dup(birth.pipe.fileno()))
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"to-{name}")
        loop = asyncio.get_running_loop()
        self._reader = threading.Thread(target=self._read, args=(loop,), name=f"from-{name}", daemon=True)
        self._reader.start()

    def send(self, message: ToWorker) -> None:
        self._writer.submit(self._write, _encoder.encode(message))

    def kill(self) -> None:
        """Only while its pipe is open or nobody has told its end: then the pid is still its own."""
        _kill(self.pid)

    def cut(self) -> None:
        """It reads the end of the pipe from now on, and cannot write any more; nobody hears what it wrote."""
        with contextlib.suppress(OSError):  # it is closed at the other end
            self._socket.shutdown(socket.SHUT_RDWR)
        self._writer.submit(self._close)
        self._writer.shutdown(wait=False)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._hear, self.number, _decoder.decode(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.lost.set)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the reader thread sees the same broken pipe and reports it
            self._pipe.send_bytes(data)

    def _close(self) -> None:
        """By the last of its threads, so that neither uses a descriptor that already is another file's."""
        self._reader.join()
        self._pipe.close()
        self._socket.close()


class _Worker:
    """One place in the executor, filled by one process after another."""

    def __init__(self, spec: WorkerSpec, silence_s: float, nursery: Nursery, changed: Callable[[], None]) -> None:
        self._spec = spec
        self._silence_s = silence_s
        self._nursery = nursery
        self._changed = changed
        self._phase: WorkerPhase = "down"
        self._process: _Incarnation | None = None
        self._in_flight: dict[str, _InFlight] = {}
        self._restarts = 0
        self._failed_starts = 0
        self._last_exit: ExitReason | None = None
        self._told: set[str] = set()

    def state(self) -> WorkerState:
        pid, peak = (None, 0) if self._process is None else (self._process.pid, self._process.peak_rss_bytes)
        return WorkerState(self._spec.id, self._phase, pid, self._restarts, peak, self._last_exit, self._failed_starts)

    async def run(self, task: Task, on_progress: OnProgress | None) -> Outcome:
        if self._process is None or self._phase != "ready":
            raise WorkerLost(self._spec.id, self._last_exit or _STOPPED)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._in_flight[task.id] = _InFlight(future, on_progress)
        self._process.send(task)
        return await future

    def cancel(self, task_id: str) -> None:
        if self._process is not None and self._phase == "ready" and task_id in self._in_flight:
            self._process.send(Cancel(task_id))

    async def keep_alive(self) -> None:
        """Start a process, watch it, and replace it when it is lost; the pause grows while starts fail."""
        pause = _FIRST_RETRY_S
        while True:
            became_ready, reason = await self._one_life()
            self._failed_starts = 0 if became_ready else self._failed_starts + 1
            self._bury(reason)
            if not became_ready:
                self._tell(reason)
            pause = _FIRST_RETRY_S if became_ready else min(pause * 2, _LAST_RETRY_S)
            await asyncio.sleep(pause)
            self._restarts += 1

    async def stop(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            await asyncio.wait({process.ended}, timeout=_EXIT_CODE_S)
        self._bury(_STOPPED)

    async def _one_life(self) -> tuple[bool, ExitReason]:
        """Start a process and wait until it is lost: whether it had become ready, and why it was lost."""
        self._phase = "starting"
        try:
            birth = await self._nursery.fork(self._spec)
        except CannotFork as error:
            return False, ExitReason("exit", f"it could not be started: {error}")
        self._process = process = _Incarnation(self._restarts, birth, self._spec.id, self._received)
        await self._watch(process)
        return process.ready, await self._autopsy(process)

    def _received(self, incarnation: int, message: FromWorker) -> None:
        process = self._process
        if process is None or process.number != incarnation:
            return  # from one whose place another has taken
        process.heard_at = time.monotonic()
        match message:
            case Done(task_id=task_id) | Failed(task_id=task_id):
                ended = self._in_flight.pop(task_id, None)
                if ended is not None and not ended.outcome.done():
                    ended.outcome.set_result(message)
            case Progress(task_id=task_id):
                running = self._in_flight.get(task_id)
                if running is not None and running.on_progress is not None:
                    running.on_progress(message)
            case Pong(peak_rss_bytes=peak):
                process.peak_rss_bytes = peak
            case LastWords(message=words):
                process.last_words = words
            case Ready():
                process.ready = True
                self._phase = "ready"
                self._failed_starts = 0
                self._changed()

    async def _watch(self, process: _Incarnation) -> None:
        """Until the process is lost, or silent for so long that it counts as lost; then it is killed."""
        while True:
            try:
                async with asyncio.timeout(_PING_EVERY_S):
                    await process.lost.wait()
            except TimeoutError:
                if not process.ready:
                    continue  # preparing itself; the pipe tells if it dies
                if time.monotonic() - process.heard_at > self._silence_s:
                    process.silent = True
                    process.kill()
                    return  # its death, which may take its time, is not waited for
                process.send(Ping())
            else:
                return

    async def _autopsy(self, process: _Incarnation) -> ExitReason:
        """Why the process is lost."""
        peak_bytes = process.peak_rss_bytes
        if process.silent:
            return ExitReason("silent", f"no sign of life for {self._silence_s:.0f} s; killed", None, peak_bytes)
        await asyncio.wait({process.ended}, timeout=_EXIT_CODE_S)
        code = process.ended.result() if process.ended.done() else None
        peak = f"peak memory {peak_bytes / 2**20:.0f} MiB" if peak_bytes else "no memory figure yet"
        if code is None:
            return ExitReason("exit", f"its pipe closed, and no exit code is known ({peak})", code, peak_bytes)
        if code == -signal.SIGKILL and _oom_kills() > process.oom_kills_before:
            return ExitReason("out_of_memory", f"killed by the kernel: out of memory ({peak})", code, peak_bytes)
        if code < 0:
            return ExitReason("signal", f"ended by signal {signal.Signals(-code).name} ({peak})", code, peak_bytes)
        if process.last_words is not None:
            return ExitReason("exit", f"ended with {process.last_words}", code, peak_bytes)
        return ExitReason("exit", f"ended with exit code {code} ({peak})", code, peak_bytes)

    def _bury(self, reason: ExitReason) -> None:
        self._phase = "down"
        self._last_exit = reason
        if self._process is not None:
            self._process.cut()
            self._process = None
        lost, self._in_flight = self._in_flight, {}
        for task in lost.values():
            if not task.outcome.done():
                task.outcome.set_exception(WorkerLost(self._spec.id, reason))
        self._changed()

    def _tell(self, reason: ExitReason) -> None:
        """A start that fails is tried again and again, for the same reason: it is logged once."""
        if reason.detail not in self._told:
            self._told.add(reason.detail)
            log.error("worker %s cannot start (it is tried again): %s", self._spec.id, reason.detail)


_STOPPED = ExitReason("stopped", "the executor was stopped")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot (0 where it does not say)."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
