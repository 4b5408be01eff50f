"""The worker process: a reader thread that answers at once, and a loop that computes.

Invariant: the reader never computes and the loop never waits for the pipe, so a ping is answered whatever runs.
Training and sampling share the time: after a training pass the sampler gets about as long, if it has work.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import msgspec
import torch

from gradserve.compute.archive import Archive
from gradserve.compute.engine.arrays import Arrays, cache_bytes
from gradserve.compute.engine.base import Base, Bases
from gradserve.compute.engine.engine import Engine, TrainingTask
from gradserve.compute.engine.machine import Machine
from gradserve.compute.engine.memory import peak_rss_bytes
from gradserve.compute.engine.merge import take
from gradserve.compute.engine.sampler import Sampler
from gradserve.compute.engine.vllm_adapters import MOST_ADAPTERS
from gradserve.compute.engine.vllm_engine import VllmEngine
from gradserve.compute.engine.vllm_sampler import VllmSampler, say
from gradserve.compute.objects import ObjectStore
from gradserve.compute.tasks import (
    Cancel,
    FromWorker,
    GradTask,
    LastWords,
    Outcome,
    Ping,
    Pong,
    Ready,
    SampleTask,
    Task,
    ToWorker,
    WorkerSpec,
)

if TYPE_CHECKING:
    from gradserve.compute.engine.preload import Preloaded

    _Pipe: TypeAlias = Connection[Any, Any]
else:  # generic only for type checkers
    _Pipe = Connection


def main(connection: _Pipe, spec: WorkerSpec, preloaded: Preloaded | None = None) -> None:
    """Serve Tasks until the other end of ``connection`` is closed. Messages are msgpack (tasks.ToWorker).

    ``preloaded`` is used where it fits ``spec``. What cannot go on says why (LastWords) and raises.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's; it then closes the pipe
    wire = _Wire(connection)
    try:
        if preloaded is not None and preloaded.fits(spec):
            torch.set_num_threads(spec.threads)
            worker = _Worker(wire, spec, preloaded.machine, preloaded.bases)
        else:
            worker = _Worker(wire, spec, Machine.of(spec))
        worker.serve()
    except Exception as error:
        wire.send(LastWords(traceback.format_exception_only(error)[-1].strip()))
        raise


class _Wire:
    """The pipe with its codec. Both threads send."""

    def __init__(self, connection: _Pipe) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: FromWorker) -> None:
        try:
            with self._lock:
                self._connection.send_bytes(self._encoder.encode(message))
        except (BrokenPipeError, ConnectionResetError):
            _end()

    def receive(self) -> ToWorker:
        return self._decoder.decode(self._connection.recv_bytes())


class _Worker:
    """Two queues and a debt: how many seconds the sampler is owed before the next training pass."""

    def __init__(self, wire: _Wire, spec: WorkerSpec, machine: Machine, loaded: dict[str, Base] | None = None) -> None:
        self._wire = wire
        self._inbox: queue.SimpleQueue[Task | Cancel] = queue.SimpleQueue()
        self._training: list[TrainingTask] = []
        self._merge_tokens = spec.merge_tokens
        self._owed_s = 0.0
        self._started = 0.0
        bases = Bases(spec.bases, machine.device, machine.dtype, machine.kernels, loaded)
        archive = None if spec.archive_url is None else Archive(spec.archive_url, spec.archive_options)
        store = ObjectStore(Path(spec.objects), Path(spec.durable_objects), archive)
        arrays = Arrays(store, machine.device, cache_bytes(spec.memory_bytes))
        self._engine = Engine(bases, arrays, spec.memory_bytes, self._between_passes)
        self._sampler = _sampler(spec, bases, arrays)

    def serve(self) -> None:
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        self._wire.send(Ready(os.getpid()))
        while True:
            self._collect(wait=not self._training and not self._sampler.busy)
            self._advance()

    def _read(self) -> None:
        try:
            while True:
                message = self._wire.receive()
                if isinstance(message, Ping):
                    self._wire.send(Pong(peak_rss_bytes()))
                else:
                    self._inbox.put(message)
        except (EOFError, OSError):
            _end()
        except BaseException:
            os._exit(1)

    def _collect(self, wait: bool) -> None:
        """Take what has arrived; with ``wait`` (there is nothing else to do) at least one message."""
        try:
            while True:
                message = self._inbox.get(block=wait)
                wait = False
                match message:
                    case SampleTask():
                        self._sampler.add(message)
                    case Cancel(task_id=task_id):
                        self._cancel(task_id)
                    case _:
                        self._training.append(message)
        except queue.Empty:
            return

    def _cancel(self, task_id: str) -> None:
        outcome = self._sampler.cancel(task_id)
        if outcome is not None:
            self._wire.send(outcome)

    def _advance(self) -> None:
        """One training pass or one sampling pass."""
        self._started = started = time.monotonic()
        if self._training and (self._owed_s <= 0 or not self._sampler.busy):
            for outcome in self._train(take(self._training, self._merge_tokens)):
                self._wire.send(outcome)
            self._owed_s = time.monotonic() - self._started
        elif self._sampler.busy:
            for message in self._sampler.step():
                self._wire.send(message)
            self._owed_s -= time.monotonic() - started

    def _train(self, tasks: list[TrainingTask]) -> list[Outcome]:
        grads = [task for task in tasks if isinstance(task, GradTask)]
        return self._engine.run_together(grads) if grads else [self._engine.run(task) for task in tasks]

    def _between_passes(self) -> None:
        """A training Task of several passes gives way after each, so that nobody's samples wait for its end."""
        self._collect(wait=False)
        until = 2 * time.monotonic() - self._started
        while self._sampler.busy and time.monotonic() < until:
            for message in self._sampler.step():
                self._wire.send(message)
        self._started = time.monotonic()


def _end() -> NoReturn:
    """The server is gone, or has given this worker up: nothing here is worth keeping."""
    os._exit(0)


def _sampler(spec: WorkerSpec, bases: Bases, arrays: Arrays) -> Sampler | VllmSampler:
    if spec.sampler == "builtin":
        return Sampler(bases, arrays, spec.kv_cache_bytes // max(1, len(spec.bases)), spec.pass_tokens)
    (base,) = spec.bases

    def start(loaded: Base) -> VllmEngine:
        return VllmEngine(
            base.path, loaded.context, spec.kv_cache_bytes, spec.pass_tokens, spec.max_lora_rank, MOST_ADAPTERS
        )

    folders = Path(spec.objects) / f"vllm-{spec.id}"
    return VllmSampler(base.name, bases, arrays, start, folders, spec.max_lora_rank, say)
