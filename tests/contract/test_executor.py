"""The local executor with real processes: Tasks run, deaths are told and mended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gradserve.compute.executor import WorkerLost, WorkerState
from gradserve.compute.local import LocalExecutor
from gradserve.compute.objects import ObjectStore
from gradserve.compute.tasks import (
    BaseSpec,
    Done,
    Failed,
    InitTask,
    Progress,
    Ready,
    SampleTask,
    ToWorker,
    Usage,
    WorkerSpec,
)
from gradserve.compute.zygote.handle import Birth
from gradserve.wire.data import as_tokens
from gradserve.wire.ops import LoraConfig, Sample, SamplingParams


def spec(tmp_path: Path, tiny_models: dict[str, str], name: str = "w") -> WorkerSpec:
    bases = (BaseSpec("tiny", tiny_models["tiny"]),)
    return WorkerSpec(name, 1, bases, str(tmp_path / "fast"), str(tmp_path / "durable"), 64 << 20, 256)


def init(number: int, base: str = "tiny") -> InitTask:
    return InitTask(f"init/{number}", base, LoraConfig(4, seed=number))


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (another process changes it)
            await asyncio.sleep(0.02)


def run_with(executor: LocalExecutor, scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await executor.start()
        try:
            await until(lambda: all(worker.phase == "ready" for worker in executor.workers()))
            await scenario()
        finally:
            await executor.close()

    asyncio.run(whole())


def the(executor: LocalExecutor) -> WorkerState:
    (worker,) = executor.workers()
    return worker


def test_the_same_task_gives_the_same_object(tmp_path: Path, tiny_models: dict[str, str]) -> None:
    executor = LocalExecutor([spec(tmp_path, tiny_models)])
    objects = ObjectStore(tmp_path / "fast", tmp_path / "durable")

    async def scenario() -> None:
        first, again, other = [await executor.run("w", init(n)) for n in (1, 1, 2)]
        assert isinstance(first, Done)
        assert isinstance(again, Done)
        assert isinstance(other, Done)
        assert first.objects == again.objects != other.objects
        data = objects.path(first.objects["weights"]).read_bytes()
        assert ObjectStore.digest(data) == first.objects["weights"]

    run_with(executor, scenario)


def test_a_task_that_raises_leaves_the_worker_alive(tmp_path: Path, tiny_models: dict[str, str]) -> None:
    executor = LocalExecutor([spec(tmp_path, tiny_models)])

    async def scenario() -> None:
        pid = the(executor).pid
        outcome = await executor.run("w", init(1, base="no-such-base"))
        assert isinstance(outcome, Failed)
        assert "no-such-base" in outcome.message
        assert isinstance(await executor.run("w", init(2)), Done)
        assert the(executor).pid == pid

    run_with(executor, scenario)


def test_a_killed_worker_is_told_and_replaced(tmp_path: Path, tiny_models: dict[str, str]) -> None:
    executor = LocalExecutor([spec(tmp_path, tiny_models)])
    changes: list[str] = []
    executor.on_change = lambda: changes.append(the(executor).phase)

    async def scenario() -> None:
        pid = the(executor).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that the Task is certainly in flight
        running = asyncio.create_task(executor.run("w", init(1)))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="SIGKILL") as lost:
            await running
        assert lost.value.reason.kind == "signal"
        assert lost.value.reason.exit_code == -signal.SIGKILL
        await until(lambda: the(executor).phase == "ready")
        assert the(executor).pid != pid
        assert the(executor).restarts == 1
        assert isinstance(await executor.run("w", init(1)), Done)

    run_with(executor, scenario)
    assert "down" in changes
    assert "ready" in changes


def test_a_silent_worker_is_killed(
    tmp_path: Path, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradserve.compute.local._PING_EVERY_S", 0.2)
    executor = LocalExecutor([spec(tmp_path, tiny_models)], silence_s=1.0)

    async def scenario() -> None:
        pid = the(executor).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="no sign of life"):
            await executor.run("w", init(1))
        await until(lambda: the(executor).phase == "ready")
        assert isinstance(await executor.run("w", init(1)), Done)

    run_with(executor, scenario)


def test_closing_fails_what_is_in_flight(tmp_path: Path, tiny_models: dict[str, str]) -> None:
    executor = LocalExecutor([spec(tmp_path, tiny_models)])

    async def scenario() -> None:
        pid = the(executor).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        running = asyncio.create_task(executor.run("w", init(1)))
        await asyncio.sleep(0.1)
        await executor.close()
        with pytest.raises(WorkerLost) as lost:
            await running
        assert lost.value.reason.kind == "stopped"

    run_with(executor, scenario)


def endless(name: str) -> SampleTask:
    """More than is ever sampled in a test: 200 sequences to the end of the context."""
    params = SamplingParams(400, seed=1)
    return SampleTask(name, Sample("tiny", None, as_tokens([30, 31]), 200, params))


def test_a_cancelled_sample_ends_at_once_and_others_go_on(tmp_path: Path, tiny_models: dict[str, str]) -> None:
    executor = LocalExecutor([spec(tmp_path, tiny_models)])

    async def scenario() -> None:
        running = [asyncio.create_task(executor.run("w", endless(name))) for name in ("a", "b")]
        short = SampleTask("c", Sample("tiny", None, as_tokens([40]), 1, SamplingParams(3, seed=1)))
        assert isinstance(await executor.run("w", short), Done), "so the worker has been given the others"
        for name in ("a", "b", "a", "nobody"):
            executor.cancel("w", name)
        for name, outcome in zip("ab", await asyncio.gather(*running), strict=True):
            assert isinstance(outcome, Failed)
            assert (outcome.task_id, outcome.kind) == (name, "cancelled")
        assert isinstance(await executor.run("w", init(1)), Done)

    run_with(executor, scenario)


def test_a_streamed_sample_is_told_in_parts(tmp_path: Path, tiny_models: dict[str, str]) -> None:
    executor = LocalExecutor([spec(tmp_path, tiny_models)])
    told: list[Progress] = []

    async def scenario() -> None:
        op = Sample("tiny", None, as_tokens([40]), 2, SamplingParams(6, seed=1))
        outcome = await executor.run("w", SampleTask("a", op, stream=True), told.append)
        assert isinstance(outcome, Done)
        assert outcome.sample is not None
        for index, sequence in enumerate(outcome.sample.sequences):
            parts = [report for report in told if report.index == index]
            assert len(parts) > 1
            assert b"".join(report.tokens for report in parts) == sequence.tokens
            assert b"".join(report.logprobs for report in parts) == sequence.logprobs

    run_with(executor, scenario)


class Nurse:
    """Hands out the ends of pipes whose other ends the test has: a worker that is made of nothing."""

    def __init__(self) -> None:
        self.ends: list[Any] = []

    async def fork(self, spec: WorkerSpec) -> Birth:
        ours, theirs = socket.socketpair()
        self.ends.append(Connection(theirs.detach()))
        self.ends[-1].send_bytes(msgspec.msgpack.encode(Ready(os.getpid())))
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        ended.set_result(0)
        return Birth(_NOBODY, ours, ended)

    async def close(self) -> None:
        pass


_NOBODY = 2**22 + 1
"""A pid that Linux never gives."""


def stream(pipe: Any) -> None:
    """A streamed sample gives tokens 1, 2, 3 of two sequences, then its outcome."""
    decoder = msgspec.msgpack.Decoder(ToWorker)
    while True:
        try:
            message = decoder.decode(pipe.recv_bytes())
        except EOFError:
            return
        if isinstance(message, SampleTask):
            for token in (1, 2, 3) if message.stream else ():
                for index in (0, 1):
                    report = Progress(message.id, index, as_tokens([token * 10 + index]), b"\0" * 4)
                    pipe.send_bytes(msgspec.msgpack.encode(report))
            pipe.send_bytes(msgspec.msgpack.encode(Done(message.id, Usage())))


def test_progress_is_told_in_order_before_the_outcome(tmp_path: Path, tiny_models: dict[str, str]) -> None:
    nurse = Nurse()
    executor = LocalExecutor([spec(tmp_path, tiny_models)], nursery=nurse)
    told: list[tuple[int, bytes]] = []

    async def scenario() -> None:
        threading.Thread(target=stream, args=nurse.ends).start()
        task = msgspec.structs.replace(endless("a"), stream=True)
        outcome = await executor.run("w", task, lambda report: told.append((report.index, report.tokens)))
        assert isinstance(outcome, Done)
        assert told == [(i, as_tokens([token * 10 + i])) for token in (1, 2, 3) for i in (0, 1)]
        assert isinstance(await executor.run("w", task), Done), "nobody has to listen"
        assert len(told) == 6

    run_with(executor, scenario)
