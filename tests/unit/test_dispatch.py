"""Tasks go to workers with room, in turns between clients, and survive lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from gradserve.compute.executor import ExitReason, WorkerLost, WorkerState
from gradserve.compute.tasks import Done, Failed, GradTask, Outcome, Progress, ReduceTask, SampleTask, Task, Usage
from gradserve.orchestration.dispatch import AttemptsExhausted, Dispatcher, NoWorkers, TaskCancelled
from gradserve.orchestration.streams import TokenStream
from gradserve.wire.data import Row, as_tokens
from gradserve.wire.ops import Sample, SamplingParams

LOST = ExitReason("signal", "ended by signal SIGKILL", -9)


class FakeExecutor:
    """Workers whose Tasks end when the test says so."""

    def __init__(self, *workers: str) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.ready = list(workers)
        self.others: list[WorkerState] = []
        self.running: dict[str, tuple[str, asyncio.Future[Outcome]]] = {}
        self.order: list[str] = []
        self.cancelled: list[tuple[str, str]] = []
        self.report: Callable[[Progress], None] = lambda _: None
        """Where the Task that started last reports its tokens, if anybody listens."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def workers(self) -> list[WorkerState]:
        return [*self.others, *(WorkerState(name, "ready", 1, 0, 0) for name in self.ready)]

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

    def kill(self, worker: str) -> None:
        """The worker dies with all that it holds."""
        for task_id in [task_id for task_id, (where, _) in self.running.items() if where == worker]:
            self.lose(task_id)


async def settle_down() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def task(name: str) -> Task:
    return ReduceTask(name, [])


def sample(name: str, count: int = 1) -> SampleTask:
    return SampleTask(name, Sample("tiny", None, as_tokens([1]), count, SamplingParams(4, seed=0)))


def grad(name: str, tokens: int) -> Task:
    return GradTask(name, "base", "weights", [Row(bytes(4 * tokens), {})], "cross_entropy", {}, backward=True)


def test_clients_take_turns() -> None:
    async def scenario() -> list[str]:
        executor = FakeExecutor("w")
        dispatcher = Dispatcher(executor, attempts=3)
        waiting = [asyncio.create_task(dispatcher.run(grad(f"a{n}", 600), "a")) for n in range(4)]
        await settle_down()
        waiting.append(asyncio.create_task(dispatcher.run(grad("b0", 600), "b")))
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


def test_small_tasks_are_handed_out_ahead_up_to_two_passes() -> None:
    async def held(tokens: int) -> int:
        executor = FakeExecutor("w")
        dispatcher = Dispatcher(executor, attempts=3, merge_tokens=512)
        waiting = [asyncio.create_task(dispatcher.run(grad(f"g{n}", tokens), f"run-{n}")) for n in range(100)]
        await settle_down()
        count = len(executor.running)
        for work in waiting:
            work.cancel()
        await dispatcher.close()
        return count

    assert [asyncio.run(held(tokens)) for tokens in (32, 128, 512, 600, 4000)] == [32, 8, 2, 2, 2]


def test_an_idle_worker_gets_the_next_small_task() -> None:
    async def scenario() -> list[str]:
        executor = FakeExecutor("w1", "w2")
        dispatcher = Dispatcher(executor, attempts=3)
        waiting = [asyncio.create_task(dispatcher.run(grad(f"g{n}", 32), f"run-{n}")) for n in range(6)]
        await settle_down()
        workers = sorted(worker for worker, _ in executor.running.values())
        for work in waiting:
            work.cancel()
        await dispatcher.close()
        return workers

    assert asyncio.run(scenario()) == ["w1"] * 3 + ["w2"] * 3


def test_a_task_that_kills_its_worker_does_not_use_up_its_neighbours_attempts() -> None:
    """Eight small Tasks are in one worker's hands; one of them kills every worker. The other seven succeed."""

    async def scenario() -> tuple[list[bool], list[set[str]]]:
        executor = FakeExecutor("w")
        dispatcher = Dispatcher(executor, attempts=3)
        waiting = [asyncio.create_task(dispatcher.run(grad(f"g{n}", 32), f"run-{n}")) for n in range(8)]
        seen: list[set[str]] = []
        await settle_down()
        while executor.running:
            seen.append(set(executor.running))
            if "g3" in executor.running:
                executor.kill("w")
            else:
                executor.finish(next(iter(executor.running)))
            await settle_down()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        return [isinstance(result, Done) for result in results], seen

    succeeded, seen = asyncio.run(scenario())
    assert succeeded == [number != 3 for number in range(8)]
    assert len(seen[0]) == 8
    assert all(len(held) == 1 for held in seen[1:]), "after a loss each suspect is alone"
    assert seen.count({"g3"}) == 2


def unable(name: str, failed_starts: int) -> WorkerState:
    """A worker whose process has ended before it was ready, so many times."""
    return WorkerState(name, "starting", None, failed_starts, 0, ExitReason("exit", "ended: no GPU"), failed_starts)


def test_what_waits_for_workers_that_cannot_start_is_told_so() -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        executor.others = [unable("v", 5), unable("w", 4)]
        dispatcher = Dispatcher(executor, attempts=3)
        waiting = [asyncio.create_task(dispatcher.run(task(name), name)) for name in "ab"]
        await settle_down()
        assert not any(one.done() for one in waiting), "w may still start"
        executor.others = [unable("v", 5), unable("w", 5)]
        dispatcher.pump()
        for one in waiting:
            with pytest.raises(NoWorkers, match="ended: no GPU"):
                await one
        with pytest.raises(NoWorkers):
            await dispatcher.run(task("c"), "c")
        executor.ready = ["w"]
        later = asyncio.create_task(dispatcher.run(task("d"), "d"))
        await settle_down()
        executor.finish("d")
        assert isinstance(await later, Done)

    asyncio.run(scenario())
