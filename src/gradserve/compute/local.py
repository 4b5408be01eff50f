"""The executor of one machine: worker processes forked from a server that has torch imported.

A fork of the forkserver is ready in tenths of a second, so a killed worker is back before its clients notice.
Each worker has one pipe; a thread here reads it and a thread writes it, so that the event loop never blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from gradserve.compute.executor import ExitReason, WorkerLost, WorkerPhase, WorkerState
from gradserve.compute.tasks import (
    Cancel,
    Done,
    Failed,
    FromWorker,
    Outcome,
    Ping,
    Pong,
    Progress,
    Ready,
    Task,
    ToWorker,
    WorkerSpec,
)

if TYPE_CHECKING:
    _Pipe: TypeAlias = Connection[Any, Any]
else:  # generic only for type checkers
    _Pipe = Connection

OnProgress: TypeAlias = Callable[[Progress], None]

_context = multiprocessing.get_context("forkserver")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromWorker)

_PRELOAD = ["gradserve.compute.local", "gradserve.compute.engine.worker"]
_PING_EVERY_S = 5.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 30.0


def warm_up() -> None:
    """Start the forkserver, so that it imports torch while the caller does something else."""
    # By default idle threads of OpenMP spin. With anything else running on the machine (the client's script, say) a
    # spinning thread loses its time slice when its partner needs it: measured 2 to 10 times slower on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _context.set_forkserver_preload(_PRELOAD)
    multiprocessing.forkserver.ensure_running()


def _child(connection: _Pipe, spec: bytes) -> None:
    from gradserve.compute.engine.worker import main

    main(connection, msgspec.msgpack.decode(spec, type=WorkerSpec))


class _InFlight(NamedTuple):
    """A Task in a worker's hands, and who hears of it."""

    outcome: asyncio.Future[Outcome]
    on_progress: OnProgress | None


class LocalExecutor:
    """Keeps one process alive per spec."""

    def __init__(self, specs: list[WorkerSpec], silence_s: float = 60.0) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._workers = {spec.id: _Worker(spec, silence_s, self._changed) for spec in specs}
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to start the workers; see Executor."""
        warm_up()
        self._keepers = [asyncio.create_task(worker.keep_alive()) for worker in self._workers.values()]

    async def close(self) -> None:
        """Stop the workers; see Executor."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for worker in self._workers.values():
            await worker.stop()

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


class _Worker:
    """One place in the executor, filled by one process after another."""

    def __init__(self, spec: WorkerSpec, silence_s: float, changed: Callable[[], None]) -> None:
        self._spec = spec
        self._silence_s = silence_s
        self._changed = changed
        self._phase: WorkerPhase = "down"
        self._process: ForkServerProcess | None = None
        self._pipe: _Pipe | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._in_flight: dict[str, _InFlight] = {}
        self._lost = asyncio.Event()
        self._heard_at = 0.0
        self._peak = 0
        self._silent = False
        self._restarts = 0
        self._last_exit: ExitReason | None = None

    def state(self) -> WorkerState:
        pid = self._process.pid if self._process and self._phase != "down" else None
        return WorkerState(self._spec.id, self._phase, pid, self._restarts, self._peak, self._last_exit)

    async def run(self, task: Task, on_progress: OnProgress | None) -> Outcome:
        if self._phase != "ready":
            raise WorkerLost(self._spec.id, self._last_exit or _STOPPED)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._in_flight[task.id] = _InFlight(future, on_progress)
        self._send(task)
        return await future

    def cancel(self, task_id: str) -> None:
        if self._phase == "ready" and task_id in self._in_flight:
            self._send(Cancel(task_id))

    async def keep_alive(self) -> None:
        """Start a process, watch it, and replace it when it is lost; the pause grows while starts fail."""
        pause = _FIRST_RETRY_S
        while True:
            await self._start()
            became_ready = await self._watch()
            self._bury(await asyncio.to_thread(self._autopsy))
            pause = _FIRST_RETRY_S if became_ready else min(pause * 2, _LAST_RETRY_S)
            await asyncio.sleep(pause)
            self._restarts += 1

    async def stop(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, 5)
        self._bury(_STOPPED)

    async def _start(self) -> None:
        ours, theirs = _context.Pipe()
        self._oom_kills = _oom_kills()
        self._lost.clear()
        self._silent = False
        self._peak = 0
        self._phase = "starting"
        self._heard_at = time.monotonic()
        process = _context.Process(
            target=_child,
            args=(theirs, msgspec.msgpack.encode(self._spec)),
            name=f"gradserve-worker-{self._spec.id}",
            daemon=True,
        )
        await asyncio.to_thread(process.start)  # the first one waits until the forkserver has imported torch
        theirs.close()
        self._process, self._pipe = process, ours
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"to-{self._spec.id}")
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(ours, loop), name=f"from-{self._spec.id}", daemon=True).start()

    def _read(self, pipe: _Pipe, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._received, _decoder.decode(pipe.recv_bytes()))
        except (EOFError, OSError):
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._lost.set)

    def _received(self, message: FromWorker) -> None:
        self._heard_at = time.monotonic()
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
                self._peak = peak
            case Ready():
                self._phase = "ready"
                self._changed()

    def _send(self, message: ToWorker) -> None:
        assert self._writer is not None
        assert self._pipe is not None
        self._writer.submit(self._write, self._pipe, _encoder.encode(message))

    @staticmethod
    def _write(pipe: _Pipe, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the reader thread sees the same broken pipe and reports it
            pipe.send_bytes(data)

    async def _watch(self) -> bool:
        """Until the process is lost; kills it when it stops answering. Returns whether it had become ready."""
        while not self._lost.is_set():
            try:
                await asyncio.wait_for(self._lost.wait(), _PING_EVERY_S)
            except TimeoutError:
                if self._phase != "ready":
                    continue  # importing; the pipe tells if it dies
                if time.monotonic() - self._heard_at > self._silence_s:
                    self._silent = True
                    assert self._process is not None
                    self._process.kill()
                self._send(Ping())
        return self._phase == "ready"

    def _autopsy(self) -> ExitReason:
        """Why the process ended; waits for it (a closed pipe comes a moment before the exit code)."""
        assert self._process is not None
        self._process.join(10)
        code = self._process.exitcode
        peak = f"peak memory {self._peak / 2**20:.0f} MiB" if self._peak else "no memory figure yet"
        if self._silent:
            return ExitReason("silent", f"no sign of life for {self._silence_s:.0f} s; killed", code, self._peak)
        if code == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            return ExitReason("out_of_memory", f"killed by the kernel: out of memory ({peak})", code, self._peak)
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return ExitReason("signal", f"ended by signal {name} ({peak})", code, self._peak)
        return ExitReason("exit", f"ended with exit code {code} ({peak})", code, self._peak)

    def _bury(self, reason: ExitReason) -> None:
        self._phase = "down"
        self._last_exit = reason
        if self._pipe is not None:
            self._pipe.close()
        if self._writer is not None:
            self._writer.shutdown(wait=False, cancel_futures=True)
        lost, self._in_flight = self._in_flight, {}
        for task in lost.values():
            if not task.outcome.done():
                task.outcome.set_exception(WorkerLost(self._spec.id, reason))
        self._changed()


_STOPPED = ExitReason("stopped", "the executor was stopped")


def _oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot (0 where it does not say)."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
