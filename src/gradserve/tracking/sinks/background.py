"""A sink behind a thread: a service that answers late, or never, holds up no step."""

from __future__ import annotations

import contextlib
import queue
import threading
import time as clock
from collections.abc import Callable, Mapping

from gradserve.tracking.sinks import Sink

_CALLS_WAITING = 1000
_CLOSE_S = 60.0


class Background:
    """Calls go to ``sink`` in their order, on a thread of its own. What one raises, a later call or ``close`` raises.

    With ``waiting`` calls not yet made, further ones raise queue.Full and are lost. ``close`` waits ``close_s`` for
    them at most, then raises TimeoutError.
    """

    def __init__(self, sink: Sink, waiting: int = _CALLS_WAITING, close_s: float = _CLOSE_S) -> None:
        self._sink, self._close_s = sink, close_s
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(waiting)
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        # A daemon, as a thread that waits for a dead service would keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracking-{type(sink).__name__}", daemon=True)
        self._thread.start()

    def metrics(self, step: int, time: float, values: Mapping[str, float | None]) -> None:
        self._put(lambda: self._sink.metrics(step, time, values))

    def text(self, step: int, time: float, name: str, markdown: str) -> None:
        self._put(lambda: self._sink.text(step, time, name, markdown))

    def close(self) -> None:
        end = clock.monotonic() + self._close_s
        with contextlib.suppress(queue.Full):  # Said below.
            for call in (self._sink.close, None):
                self._calls.put(call, timeout=max(0.0, end - clock.monotonic()))
        self._thread.join(max(0.0, end - clock.monotonic()))
        if self._thread.is_alive():
            raise TimeoutError(f"{self._calls.qsize()} calls were not made within {self._close_s:g} s and are lost")
        self._raise_earlier()

    def _put(self, call: Callable[[], None]) -> None:
        self._calls.put_nowait(call)
        self._raise_earlier()

    def _raise_earlier(self) -> None:
        """Nothing, or what a call has raised meanwhile."""
        try:
            error = self._errors.get_nowait()
        except queue.Empty:
            return
        raise error

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # Whatever the sink's library raises; a later call tells it.
                self._errors.put(error)
