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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import torch

from gradserve.compute.engine.arrays import Arrays, cache_bytes
from gradserve.compute.engine.base import Bases
from gradserve.compute.engine.engine import Engine, TrainingTask
from gradserve.compute.engine.memory import peak_rss_bytes
from gradserve.compute.engine.merge import take
from gradserve.compute.engine.sampler import Sampler
from gradserve.compute.objects import ObjectStore
from gradserve.compute.tasks import (
    FromWorker,
    GradTask,
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
    _Pipe: TypeAlias = Connection[Any, Any]
else:  # generic only for type checkers
    _Pipe = Connection


def main(connection: _Pipe, spec: WorkerSpec, device: str = "cpu") -> None:
    """Serve Tasks until the other end of ``connection`` is closed. Messages are msgpack (tasks.ToWorker)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's; it then closes the pipe
    torch.set_num_threads(spec.threads)
    _Worker(_Wire(connection), spec, torch.device(device)).serve()


class _Wire:
    """The pipe with its codec. Both threads send."""

    def __init__(self, connection: _Pipe) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: FromWorker) -> None:
        with self._lock:
            self._connection.send_bytes(self._encoder.encode(message))

    def receive(self) -> ToWorker:
        return self._decoder.decode(self._connection.recv_bytes())


class _Worker:
    """Two queues and a debt: how many seconds the sampler is owed before the next training pass."""

    def __init__(self, wire: _Wire, spec: WorkerSpec, device: torch.device) -> None:
        self._wire = wire
        self._inbox: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._training: list[TrainingTask] = []
        self._merge_tokens = spec.merge_tokens
        self._owed_s = 0.0
        bases = Bases(spec.bases, device)
        store = ObjectStore(Path(spec.objects), Path(spec.durable_objects))
        arrays = Arrays(store, device, cache_bytes(spec.memory_bytes))
        self._engine = Engine(bases, arrays, spec.memory_bytes)
        self._sampler = Sampler(bases, arrays, spec.kv_cache_bytes // max(1, len(spec.bases)), spec.pass_tokens)

    def serve(self) -> None:
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        self._wire.send(Ready(os.getpid()))
        while True:
            self._collect()
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
            os._exit(0)  # the server is gone; nothing here is worth keeping
        except BaseException:
            os._exit(1)

    def _collect(self) -> None:
        """Take what has arrived; wait only when there is nothing else to do."""
        idle = not self._training and not self._sampler.busy
        try:
            while True:
                task = self._inbox.get(block=idle)
                idle = False
                if isinstance(task, SampleTask):
                    self._sampler.add(task)
                else:
                    self._training.append(task)
        except queue.Empty:
            return

    def _advance(self) -> None:
        """One training pass or one sampling pass."""
        started = time.monotonic()
        if self._training and (self._owed_s <= 0 or not self._sampler.busy):
            for outcome in self._train(take(self._training, self._merge_tokens)):
                self._wire.send(outcome)
            self._owed_s = time.monotonic() - started
        elif self._sampler.busy:
            for outcome in self._sampler.step():
                self._wire.send(outcome)
            self._owed_s -= time.monotonic() - started

    def _train(self, tasks: list[TrainingTask]) -> list[Outcome]:
        grads = [task for task in tasks if isinstance(task, GradTask)]
        return self._engine.run_together(grads) if grads else [self._engine.run(task) for task in tasks]
