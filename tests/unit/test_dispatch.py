"""Tasks go to workers with room, in turns between clients, and survive lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from gradserve.compute.executor import ExitReason, WorkerLost, WorkerState
from gradserve.compute.tasks import Done, Failed, Outcome, Progress, ReduceTask, SampleTask, Task, Usage
from gradserve.orchestration.dispatch import AttemptsExhausted, Dispatcher, TaskCancelled
from gradserve.orchestration.streams import TokenStream
from gradserve.wire.data import as_tokens
from gradserve.wire.ops import Sample, SamplingParams

LOST = ExitReason("signal", "ended by signal SIGKILL", -9)


class FakeExecutor:
    """Workers whose Tasks end when the test says so."""

    def __init__(self, *workers: str) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.ready = list(workers)
        self.running: dict[str, tuple[str, asyncio.Future[Outcome]]] = {}
        self.order: list[str] = []
        self.cancelled: list[tuple[str, str]] = []
        self.report: Callable[[Progress], None] = lambda _: None
        """Where the Task that started last reports its tokens, if anybody listens."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def workers(self) -> list[WorkerState]:
        return [WorkerState(name, "ready", 1, 0, 0) for name in self.ready]

    async def run(self, worker_id: str, task: Task, on_progress: Callable[[Progress], None] | None = None) -> Outcome:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.running[task.id] = (worker_id, future)
        self.order.append(task.id)
        if on_progress is not None:
            self.report = on_progress
        return await future

    def cancel(self, worker_id: str, task_id: str) -> None:
        self.cancelled.append((worker_id, task_id))

    def finish(self, task_id: str) -> None:
        self.running.pop(task_id)[1].set_result(Done(task_id, Usage()))

    def lose(self, task_id: str) -> None:
        worker, future = self.running.pop(task_id)
        future.set_exception(WorkerLost(worker, LOST))


async def settle_down() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def task(name: str) -> Task:
    return ReduceTask(name, [])


def sample(name: str, count: int = 1) -> SampleTask:
    return SampleTask(name, Sample("tiny", None, as_tokens([1]), count, SamplingParams(4, seed=0)))


def test_clients_take_turns() -> None:
    async def scenario() -> list[str]:
        executor = FakeExecutor("w")
        dispatcher = Dispatcher(executor, attempts=3)
        waiting = [asyncio.create_task(dispatcher.run(task(f"a{n}"), "a")) for n in range(4)]
        await settle_down()
        waiting.append(asyncio.create_task(dispatcher.run(task("b0"), "b")))
        await settle_down()
        while executor.running:
            executor.finish(next(iter(executor.running)))
            await settle_down()
        await asyncio.gather(*waiting)
        return executor.order

    assert asyncio.run(scenario()) == ["a0", "a1", "a2", "b0", "a3"]


def test_a_lost_workers_task_is_given_to_another() -> None:
    async def scenario() -> tuple[Outcome, list[str]]:
        executor = FakeExecutor("w1", "w2")
        dispatcher = Dispatcher(executor, attempts=3)
        waiting = asyncio.create_task(dispatcher.run(task("a"), "a"))
        await settle_down()
        first = executor.running["a"][0]
        executor.ready.remove(first)
        executor.lose("a")
        await settle_down()
        second = executor.running["a"][0]
        executor.finish("a")
        return await waiting, [first, second]

    outcome, workers = asyncio.run(scenario())
    assert isinstance(outcome, Done)
    assert len(set(workers)) == 2


def test_a_task_that_kills_every_worker_fails_at_last() -> None:
    async def scenario() -> None:
        executor = FakeExecutor("w")
        dispatcher = Dispatcher(executor, attempts=2)
        waiting = asyncio.create_task(dispatcher.run(task("a"), "a"))
        for _ in range(2):
            await settle_down()
            executor.lose("a")
        with pytest.raises(AttemptsExhausted, match="SIGKILL"):
            await waiting

    asyncio.run(scenario())


def test_without_workers_tasks_wait() -> None:
    async def scenario() -> bool:
        executor = FakeExecutor()
        dispatcher = Dispatcher(executor, attempts=2)
        waiting = asyncio.create_task(dispatcher.run(task("a"), "a"))
        await settle_down()
        started_early = bool(executor.running)
        executor.ready.append("w")
        dispatcher.pump()
        await settle_down()
        executor.finish("a")
        await waiting
        return started_early

    assert asyncio.run(scenario()) is False


def test_a_cancelled_sample_in_the_queue_never_runs() -> None:
    async def scenario() -> tuple[list[str], list[tuple[str, str]]]:
        executor = FakeExecutor("w")
        dispatcher = Dispatcher(executor, attempts=2)
        waiting = [asyncio.create_task(dispatcher.run(sample(name, 512), "s")) for name in ("a", "b", "c")]
        await settle_down()
        dispatcher.cancel("b")
        dispatcher.cancel("b")
        with pytest.raises(TaskCancelled):
            await waiting[1]
        executor.finish("a")
        await settle_down()
        executor.finish("c")
        await asyncio.gather(waiting[0], waiting[2])
        dispatcher.cancel("c")
        return executor.order, executor.cancelled

    assert asyncio.run(scenario()) == (["a", "c"], [])


def test_a_cancelled_sample_keeps_its_place_until_the_worker_has_let_go() -> None:
    async def scenario() -> list[str]:
        executor = FakeExecutor("w")
        dispatcher = Dispatcher(executor, attempts=2)
        first = asyncio.create_task(dispatcher.run(sample("a", 512), "s"))
        second = asyncio.create_task(dispatcher.run(sample("b", 512), "s"))
        await settle_down()
        dispatcher.cancel("a")
        with pytest.raises(TaskCancelled):
            await first
        assert executor.cancelled == [("w", "a")]
        assert executor.order == ["a"]
        executor.running.pop("a")[1].set_result(Failed("a", "cancelled", ""))
        await settle_down()
        executor.finish("b")
        await second
        return executor.order

    assert asyncio.run(scenario()) == ["a", "b"]


def test_a_cancelled_sample_is_not_given_to_another_worker() -> None:
    async def scenario() -> tuple[list[str], int]:
        executor = FakeExecutor("w")
        dispatcher = Dispatcher(executor, attempts=3)
        waiting = asyncio.create_task(dispatcher.run(sample("a"), "s"))
        await settle_down()
        dispatcher.cancel("a")
        executor.lose("a")
        await settle_down()
        with pytest.raises(TaskCancelled):
            await waiting
        return executor.order, dispatcher.lost.total()

    assert asyncio.run(scenario()) == (["a"], 0)


def progress(index: int, *tokens: int) -> Progress:
    """Tokens whose log-probs are their negatives."""
    return Progress("a", index, as_tokens(tokens), np.array([-token for token in tokens], "<f4").tobytes())


def test_a_stream_gives_each_token_once_though_the_worker_died() -> None:
    async def scenario() -> list[Progress]:
        executor = FakeExecutor("w")
        dispatcher = Dispatcher(executor, attempts=3)
        stream = TokenStream()
        waiting = asyncio.create_task(dispatcher.run(sample("a", 2), "s", stream))
        await settle_down()
        for report in (progress(0, 11), progress(1, 21, 22), progress(0, 12)):
            executor.report(report)
        executor.lose("a")
        await settle_down()
        # Again from the start, in other portions: the same tokens, then the rest.
        for report in (progress(0, 11, 12, 13), progress(1, 21), progress(1, 22), progress(1, 23, 24)):
            executor.report(report)
        executor.finish("a")
        await waiting
        stream.close()
        return [report async for report in stream]

    assert asyncio.run(scenario()) == [
        progress(0, 11),
        progress(1, 21, 22),
        progress(0, 12),
        progress(0, 13),
        progress(1, 23, 24),
    ]


def test_a_stream_delivers_while_the_task_runs() -> None:
    async def scenario() -> Progress:
        executor = FakeExecutor("w")
        stream = TokenStream()
        waiting = asyncio.create_task(Dispatcher(executor, attempts=3).run(sample("a"), "s", stream))
        await settle_down()
        executor.report(progress(0, 5))
        first = await anext(stream)
        assert not waiting.done()
        executor.finish("a")
        await waiting
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return first

    assert asyncio.run(scenario()) == progress(0, 5)
