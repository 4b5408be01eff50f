"""Tasks go to workers with room, in turns between clients, and survive lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gradserve.compute.executor import ExitReason, WorkerLost, WorkerState
from gradserve.compute.tasks import Done, Outcome, ReduceTask, Task, Usage
from gradserve.orchestration.dispatch import AttemptsExhausted, Dispatcher

LOST = ExitReason("signal", "ended by signal SIGKILL", -9)


class FakeExecutor:
    """Workers whose Tasks end when the test says so."""

    def __init__(self, *workers: str) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.ready = list(workers)
        self.running: dict[str, tuple[str, asyncio.Future[Outcome]]] = {}
        self.order: list[str] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def workers(self) -> list[WorkerState]:
        return [WorkerState(name, "ready", 1, 0, 0) for name in self.ready]

    async def run(self, worker_id: str, task: Task) -> Outcome:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.running[task.id] = (worker_id, future)
        self.order.append(task.id)
        return await future

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
