"""The worker as a process behind a pipe: its messages, its ping under load, its end."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gradserve.compute.engine.worker import main
from gradserve.compute.tasks import (
    BaseSpec,
    Done,
    Failed,
    FromWorker,
    GradTask,
    InitTask,
    OptimTask,
    Ping,
    Pong,
    Ready,
    SampleTask,
    ToWorker,
    WorkerSpec,
)
from gradserve.wire.ops import AdamParams, LoraConfig
from tests.numerics.lab import ask, ids, plain_rows, sample_of

_decoder = msgspec.msgpack.Decoder(FromWorker)


class Remote:
    """The server's end of a worker's pipe."""

    def __init__(self, spec: WorkerSpec) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["gradserve.compute.engine.worker"])
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=main, args=(theirs, spec), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, message: ToWorker) -> None:
        self.pipe.send_bytes(msgspec.msgpack.encode(message))

    def receive(self, timeout_s: float = 60.0) -> Any:
        assert self.pipe.poll(timeout_s), "the worker is silent"
        return _decoder.decode(self.pipe.recv_bytes())

    def ask(self, message: ToWorker) -> Any:
        self.send(message)
        return self.receive()


@pytest.fixture
def remote(models: dict[str, Path], tmp_path: Path) -> Iterator[Remote]:
    spec = WorkerSpec(
        id="w",
        threads=1,
        bases=(BaseSpec("llama", str(models["llama"])),),
        objects=str(tmp_path / "fast"),
        durable_objects=str(tmp_path / "durable"),
        kv_cache_bytes=1 << 26,
        pass_tokens=512,
    )
    worker = Remote(spec)
    yield worker
    worker.process.kill()
    worker.process.join(10)


def test_a_life(remote: Remote) -> None:
    ready = remote.receive()
    assert isinstance(ready, Ready)
    assert ready.pid == remote.process.pid

    weights = remote.ask(InitTask("i", "llama", LoraConfig(4, 0))).objects["weights"]
    grad = remote.ask(GradTask("g", "llama", weights, plain_rows(), "cross_entropy", {}, backward=True))
    assert isinstance(grad, Done)
    step = remote.ask(OptimTask("o", weights, None, [grad.objects["gradient"]], AdamParams()))
    assert set(step.objects) == {"weights", "moments"}
    sampled = remote.ask(SampleTask("s", ask("llama", ids(0, 5), step.objects["weights"], n=2)))
    assert [len(sequence.tokens) for sequence in sample_of(sampled).sequences] == [32, 32]
    failed = remote.ask(GradTask("f", "llama", weights, [], "cross_entropy", {}, backward=True))
    assert isinstance(failed, Failed)
    assert failed.kind == "user"
    assert isinstance(remote.ask(SampleTask("t", ask("llama", ids(0, 5)))), Done)

    remote.pipe.close()
    remote.process.join(10)
    assert remote.process.exitcode == 0


def test_a_ping_is_answered_during_work_and_neither_kind_of_work_starves(remote: Remote) -> None:
    assert isinstance(remote.receive(), Ready)
    weights = remote.ask(InitTask("i", "llama", LoraConfig(4, 0))).objects["weights"]
    trains, samples = 12, 6
    for index in range(trains):
        rows = plain_rows(index, (150, 150))  # too long to share a pass
        remote.send(GradTask(f"g{index}", "llama", weights, rows, "cross_entropy", {}, backward=True))
    for index in range(samples):
        remote.send(SampleTask(f"s{index}", ask("llama", ids(index, 20), n=16, max_tokens=20 + 30 * index)))
    sent = time.monotonic()
    remote.send(Ping())
    order: list[str] = []
    while len(order) < trains + samples:
        message = remote.receive()
        if isinstance(message, Pong):
            assert message.peak_rss_bytes > 1 << 20
            assert time.monotonic() - sent < 5
        else:
            assert isinstance(message, Done), message
            order.append(message.task_id)
    # Samples end among the training Tasks and the other way round, whichever is longer.
    kinds = [name[0] for name in order]
    assert "s" in kinds[: kinds.index("g") + trains]
    assert [name for name in order if name[0] == "g"] == [f"g{index}" for index in range(trains)]
    assert kinds.index("g") < len(kinds) - 1 - kinds[::-1].index("s")


def test_small_tasks_that_wait_share_a_pass_and_get_what_they_get_alone(remote: Remote) -> None:
    """Time is divided by tokens within a pass, so Tasks of one pass that are equally long took equally long."""
    assert isinstance(remote.receive(), Ready)
    weights = [remote.ask(InitTask(f"i{n}", "llama", LoraConfig(2 + n, n))).objects["weights"] for n in range(6)]
    tasks = [
        GradTask(f"g{n}", "llama", digest, plain_rows(n, (16, 20)), "cross_entropy", {}, backward=True)
        for n, digest in enumerate(weights)
    ]
    alone = [remote.ask(task) for task in tasks]
    remote.send(GradTask("first", "llama", weights[0], plain_rows(9, (200, 200, 200)), "cross_entropy", {}, True))
    for task in tasks:  # they arrive while the worker is at the first
        remote.send(task)
    assert remote.receive().task_id == "first"
    together = [remote.receive() for _ in tasks]
    for one, other in zip(together, alone, strict=True):
        assert (one.task_id, one.objects, one.rows) == (other.task_id, other.objects, other.rows)
        assert one.usage.train_tokens == 36
    times = [one.usage.compute_us for one in together]
    assert max(times) - min(times) <= 1, f"they did not share a pass: {times}"
