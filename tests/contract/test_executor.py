"""The local executor with real processes: Tasks run, deaths are told and mended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from gradserve.compute.engine.base import SMALL_HIDDEN
from gradserve.compute.executor import WorkerLost, WorkerState
from gradserve.compute.local import LocalExecutor
from gradserve.compute.objects import ObjectStore
from gradserve.compute.tasks import (
    BaseSpec,
    Done,
    Failed,
    GradTask,
    InitTask,
    LastWords,
    Ping,
    Pong,
    Progress,
    Ready,
    SampleTask,
    ToWorker,
    Usage,
    WorkerSpec,
)
from gradserve.compute.zygote.handle import Birth, Zygote, home
from gradserve.wire.data import as_tokens
from gradserve.wire.ops import LoraConfig, Sample, SamplingParams
from tests.models import build_tiny
from tests.numerics.lab import plain_rows


class Lasting(Zygote):
    """Leaves its process behind, as a killed server does: the next test need not wait until torch is imported."""

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._line is not None:
            self._line.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of the zygote of this module's tests."""
    folder = home(tmp_path_factory.mktemp("executor") / "fast")
    yield folder
    last = Zygote(folder)
    last.warm_up()
    last.stop()


@pytest.fixture
def executor(tmp_path: Path, tiny_models: dict[str, str], folder: Path) -> LocalExecutor:
    """One worker, ``w``, which never falls silent."""
    return LocalExecutor([spec(tmp_path, tiny_models)], nursery=Lasting(folder))


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


def test_the_same_task_gives_the_same_object(executor: LocalExecutor, tmp_path: Path) -> None:
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


def test_a_task_that_raises_leaves_the_worker_alive(executor: LocalExecutor) -> None:

    async def scenario() -> None:
        pid = the(executor).pid
        outcome = await executor.run("w", init(1, base="no-such-base"))
        assert isinstance(outcome, Failed)
        assert "no-such-base" in outcome.message
        assert isinstance(await executor.run("w", init(2)), Done)
        assert the(executor).pid == pid

    run_with(executor, scenario)


def test_a_killed_worker_is_told_and_replaced(executor: LocalExecutor) -> None:
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
    tmp_path: Path, tiny_models: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradserve.compute.local._PING_EVERY_S", 0.2)
    executor = LocalExecutor([spec(tmp_path, tiny_models)], 1.0, Lasting(folder))

    async def scenario() -> None:
        pid = the(executor).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="no sign of life"):
            await executor.run("w", init(1))
        await until(lambda: the(executor).phase == "ready")
        assert isinstance(await executor.run("w", init(1)), Done)

    run_with(executor, scenario)


def test_closing_fails_what_is_in_flight(executor: LocalExecutor) -> None:

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


def test_a_cancelled_sample_ends_at_once_and_others_go_on(executor: LocalExecutor) -> None:

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


def test_a_streamed_sample_is_told_in_parts(executor: LocalExecutor) -> None:
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


class Uncut(socket.socket):
    """A pipe that stays open whatever its owner does: what an old worker sends does arrive."""

    def shutdown(self, how: int) -> None:
        pass


class Nurse:
    """Hands out the ends of pipes whose other ends the test has: workers that are made of nothing."""

    def __init__(self, first: type[socket.socket] = socket.socket) -> None:
        self._first = first
        self.ends: list[Any] = []

    async def fork(self, spec: WorkerSpec) -> Birth:
        ours, theirs = socket.socketpair()
        kind = socket.socket if self.ends else self._first
        self.ends.append(Connection(theirs.detach()))
        self.ends[-1].send_bytes(msgspec.msgpack.encode(Ready(os.getpid())))
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        ended.set_result(0)
        return Birth(_NOBODY, kind(fileno=ours.detach()), ended)

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


def answer_pings(pipe: Any) -> None:
    decoder = msgspec.msgpack.Decoder(ToWorker)
    with contextlib.suppress(EOFError, OSError):
        while True:
            if isinstance(decoder.decode(pipe.recv_bytes()), Ping):
                pipe.send_bytes(msgspec.msgpack.encode(Pong(0)))


def test_nothing_that_an_older_incarnation_sends_counts(
    tmp_path: Path, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages reach the executor after its successor was given the same Task."""
    monkeypatch.setattr("gradserve.compute.local._PING_EVERY_S", 0.05)
    nurse = Nurse(first=Uncut)
    executor = LocalExecutor([spec(tmp_path, tiny_models)], 0.2, nurse)
    told: list[Progress] = []

    async def scenario() -> None:
        with pytest.raises(WorkerLost, match="no sign of life"):
            await executor.run("w", endless("a"))
        await until(lambda: the(executor).phase == "ready")
        old, new = nurse.ends
        threading.Thread(target=answer_pings, args=[new]).start()
        running = asyncio.create_task(executor.run("w", endless("a"), told.append))
        await asyncio.sleep(0)
        for message in (Progress("a", 0, b"", b""), Pong(1 << 40), Done("a", Usage(train_tokens=1)), LastWords("no")):
            old.send_bytes(msgspec.msgpack.encode(message))
        old.close()
        await asyncio.sleep(0.5)  # also what the end of its pipe would set off has come by now
        assert not running.done()
        assert told == []
        assert (the(executor).phase, the(executor).restarts, the(executor).peak_rss_bytes) == ("ready", 1, 0)
        new.send_bytes(msgspec.msgpack.encode(Done("a", Usage(train_tokens=2))))
        assert await running == Done("a", Usage(train_tokens=2))

    run_with(executor, scenario)


def test_a_worker_that_was_thought_dead_changes_nothing(
    tmp_path: Path, tiny_models: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while it samples, not even killed, and continued when its successor has done its work."""
    monkeypatch.setattr("gradserve.compute.local._PING_EVERY_S", 0.2)
    monkeypatch.setattr("gradserve.compute.local._kill", lambda pid: None)
    executor = LocalExecutor([spec(tmp_path, tiny_models)], 1.0, Lasting(folder))
    objects = ObjectStore(tmp_path / "fast", tmp_path / "durable")
    task = msgspec.structs.replace(endless("a"), stream=True)
    told: list[Progress] = []

    async def scenario() -> None:
        pid = the(executor).pid
        assert pid is not None
        old = psutil.Process(pid)
        first = asyncio.create_task(executor.run("w", task, told.append))
        await until(lambda: bool(told))
        old.suspend()
        writing = asyncio.create_task(executor.run("w", init(1)))  # it finds this in its pipe when it goes on
        for lost in (first, writing):
            with pytest.raises(WorkerLost, match="no sign of life"):
                await lost
        assert old.status() == psutil.STATUS_STOPPED
        heard = len(told)

        await until(lambda: the(executor).phase == "ready")
        new = the(executor).pid
        assert new != pid
        outcomes = [await executor.run("w", init(1)), await executor.run("w", init(2))]
        there = {file.name for file in objects.fast.iterdir()}

        old.resume()
        assert await asyncio.to_thread(old.wait, 30) in (0, None), "it ends by itself"
        assert len(told) == heard
        names = {file.name for file in objects.fast.iterdir() if file.suffix != ".tmp"}
        assert names == there
        assert all(objects.verified_path(name.removesuffix(".safetensors")) for name in names)
        assert (the(executor).pid, the(executor).restarts) == (new, 1)
        assert [(await executor.run("w", init(n))).objects for n in (1, 2)] == [one.objects for one in outcomes]  # type: ignore[union-attr]

    try:
        run_with(executor, scenario)
    finally:
        monkeypatch.undo()


def test_a_worker_that_cannot_start_says_why_and_is_logged_once(
    tmp_path: Path, tiny_models: dict[str, str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fast").write_text("a file where a folder should be")
    executor = LocalExecutor([spec(tmp_path, tiny_models)], nursery=Lasting(folder))

    async def scenario() -> None:
        await executor.start()
        try:
            await until(lambda: the(executor).restarts >= 3)
            last = the(executor).last_exit
            assert last is not None
            assert (last.kind, last.exit_code) == ("exit", 1)
            assert "FileExistsError" in last.detail
            assert str(tmp_path / "fast") in last.detail
            failed = the(executor).failed_starts
            assert failed >= 3
            (tmp_path / "fast").unlink()
            await until(lambda: the(executor).phase == "ready")
            assert the(executor).failed_starts == 0
        finally:
            await executor.close()

    asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records if "cannot start" in record.getMessage()]
    assert len(said) == 1
    assert "FileExistsError" in said[0]


def test_workers_that_compute_on_two_threads_and_a_base_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The zygote has loaded on one thread; its workers make a pool of their own. Its base is too wide for one."""
    wide = build_tiny(tmp_path / "wide", hidden=2 * SMALL_HIDDEN)
    bases = (BaseSpec("wide", str(wide)), BaseSpec("broken", str(tmp_path / "nothing")))
    fast, durable = str(tmp_path / "fast"), str(tmp_path / "durable")
    executor = LocalExecutor([WorkerSpec(name, 2, bases, fast, durable, 64 << 20, 256) for name in ("v", "w")])

    async def scenario() -> None:
        for worker in executor.workers():
            made = await executor.run(worker.id, init(1, "wide"))
            assert isinstance(made, Done)
            grad = GradTask(
                "g",
                "wide",
                made.objects["weights"],
                plain_rows(lengths=(60, 60, 60, 60)),
                "cross_entropy",
                {},
                backward=True,
            )
            done = await executor.run(worker.id, grad)
            assert isinstance(done, Done)
            assert worker.pid is not None
            assert psutil.Process(worker.pid).num_threads() > 2, "the reader, the main thread and one more"
            failed = await executor.run(worker.id, init(1, "broken"))
            assert isinstance(failed, Failed)
            assert str(tmp_path / "nothing") in failed.message
        parents = {psutil.Process(worker.pid).ppid() for worker in executor.workers()}
        assert len(parents) == 1

    run_with(executor, scenario)


def test_a_zygote_that_dies_or_hangs_is_replaced(
    tmp_path: Path, tiny_models: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers go on meanwhile; one that is lost afterwards comes from the new one."""
    executor = LocalExecutor([spec(tmp_path, tiny_models)], nursery=Lasting(folder))
    monkeypatch.setattr("gradserve.compute.zygote.handle._FORK_S", 1.0)

    def parent() -> psutil.Process:
        found = psutil.Process(the(executor).pid).parent()
        assert found is not None
        return found

    async def replaced() -> None:
        restarts = the(executor).restarts
        psutil.Process(the(executor).pid).kill()
        await until(lambda: the(executor).restarts > restarts and the(executor).phase == "ready")

    async def scenario() -> None:
        first, worker = parent(), the(executor).pid
        first.kill()
        assert isinstance(await executor.run("w", init(1)), Done)
        assert the(executor).pid == worker
        await replaced()
        second = parent()
        assert second != first
        second.suspend()
        await replaced()
        assert parent() not in (first, second)
        assert not second.is_running()
        assert isinstance(await executor.run("w", init(1)), Done)

    run_with(executor, scenario)


def test_the_home_of_a_zygote_has_a_path_short_enough_for_a_socket(tmp_path: Path) -> None:
    near, far, other = tmp_path / "a", tmp_path / ("x" * 90) / "a", tmp_path / ("x" * 90) / "b"
    assert home(Path("/dev/shm/a")).parent == Path("/dev/shm")
    assert len({home(near), home(far), home(other)}) == 3
    assert all(len(os.fsencode(home(fast) / "12345678.sock")) < 104 for fast in (near, far, other))
