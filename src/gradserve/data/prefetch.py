"""Rows read ahead by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    error: BaseException | None


def ahead(rows: Generator[T], size: int) -> Generator[T]:
    """The same in the same order, up to ``size`` of them early; an error comes where it would have come.

    When this is closed the thread has ended and ``rows`` is closed, after at most the row that was being read.
    """
    ready: queue.Queue[T | _End] = queue.Queue(maxsize=size)
    stop = threading.Event()

    def read() -> None:
        error: BaseException | None = None
        try:
            for row in rows:
                if stop.is_set():
                    break
                ready.put(row)
        except BaseException as raised:  # it is raised in the thread that waits for rows
            error = raised
        finally:
            rows.close()
            ready.put(_End(error))

    thread = threading.Thread(target=read, name="gradserve-data", daemon=True)
    thread.start()
    ended = False
    try:
        while True:
            row = ready.get()
            if isinstance(row, _End):
                ended = True
                if row.error is not None:
                    raise row.error
                return
            yield row
    finally:
        stop.set()
        while not ended:
            ended = isinstance(ready.get(), _End)
        thread.join()
