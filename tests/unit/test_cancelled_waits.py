"""Loops that wait for news end when they are cancelled, also in the moment in which news come.

asyncio.wait_for of Python 3.11 forgets such a cancellation: a server that stopped as the janitor was told of new
arrays waited for the janitor's next round, which then waited for more. ruff bans that function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gradserve.store.wakeups import Wakeups
from tests.unit.test_scheduler import World


def submissions(world: World) -> tuple[Callable[[], Awaitable[object]], Callable[[], object]]:
    wakeups = Wakeups()
    return lambda: wakeups.take_submitted(60), lambda: wakeups.ask(None)  # type: ignore[arg-type]


def an_end(world: World) -> tuple[Callable[[], Awaitable[object]], Callable[[], object]]:
    wakeups = Wakeups()
    waiter = wakeups.waiter("op")
    return lambda: wakeups.wait("op", waiter, 60), lambda: wakeups.ended("op")


def janitor(world: World) -> tuple[Callable[[], Awaitable[object]], Callable[[], object]]:
    janitor = world.scheduler._janitor
    return janitor.run, janitor.hint


@pytest.mark.parametrize("ticks", range(5))
@pytest.mark.parametrize("of", [submissions, an_end, janitor])
def test_a_wait_that_is_cancelled_as_it_ends_is_cancelled(
    of: Callable[[World], tuple[Callable[[], Awaitable[object]], Callable[[], object]]], ticks: int, tmp_path: Path
) -> None:
    async def story() -> None:
        world = World(tmp_path)
        await world.store.open()
        wait, news = of(world)

        async def waiting() -> None:
            await wait()

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0.05)
        news()
        for _ in range(ticks):  # how far the end has come through the event loop
            await asyncio.sleep(0)
        if task.cancel():  # it had not ended
            await asyncio.wait({task}, timeout=2)
            assert task.cancelled()
        await world.store.close()

    asyncio.run(story())
