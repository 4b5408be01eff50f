"""A user's code under a time limit: what it raises or how long it takes never ends more than its own episode."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable
from typing import Any

from gradserve.episodes.errors import EnvironmentUnusable, RowUnusable
from gradserve.rewards.contract import Failure

_THE_USERS_TO_MEND = (EnvironmentUnusable, RowUnusable)
"""Not an accident of one episode; these pass through."""


class Failed(Exception):
    """Carries the Failure, and the error when something was raised."""

    def __init__(self, failure: Failure, error: BaseException | None = None) -> None:
        super().__init__(failure.detail)
        self.failure, self.error = failure, error


async def bounded(function: Callable[..., Any], /, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """What the function, sync or async, returns. Raises Failed after ``timeout_s`` of wall time or when it raises.

    A sync function runs in a thread of its own, so that others' episodes go on. A thread can't be stopped: one that
    hangs is left behind until the program ends. What must be stopped, wait for in a process of its own.
    """
    name = getattr(function, "__qualname__", repr(function))
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            returned = await _in_thread(lambda: function(*args, **kwargs))
            return await returned if inspect.isawaitable(returned) else returned
    except _THE_USERS_TO_MEND:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise Failed(Failure("timeout", f"{name} gave no result within {timeout_s:g} s")) from error
        shown = "".join(traceback.format_exception(error))
        raise Failed(Failure("crash", f"{name} raised {error!r}\n{shown}"), error) from error


async def _in_thread(call: Callable[[], Any]) -> Any:
    """In a daemon: the default executor's threads are few, and the interpreter waits for them at its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(returned: Any, error: BaseException | None) -> None:
        if not done.done():  # its waiter may have given up
            done.set_result((returned, error))

    def run() -> None:
        returned, raised = None, None
        try:
            returned = call()
        except BaseException as error:
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, returned, raised)

    threading.Thread(target=run, daemon=True, name="gradserve-environment").start()
    returned, raised = await done
    if raised is not None:
        raise raised
    return returned
