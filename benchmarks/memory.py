"""Memory and processor time of a server's process tree, watched while a scenario runs.

PSS counts a page that n processes share as 1/n in each, so the sum over a tree counts it once (Linux only).
"""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Any

import psutil

from .common import tree

EVERY_S = 0.25
MIB = 1 << 20


def pss_mib(process: psutil.Process) -> float:
    """0 for a process that is gone."""
    try:
        return float(process.memory_full_info().pss) / MIB
    except psutil.Error:
        return 0.0


def processes(pid: int) -> list[dict[str, Any]]:
    """Each process of the tree, the server itself first: its short command line and PSS."""
    found = []
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            found.append({"command": _short(process.cmdline()), "pss_mib": round(pss_mib(process), 1)})
    return found


class Watch:
    """``with Watch(pid) as watch: ...; watch.result()``: peak PSS and the processor seconds used meanwhile."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0.0
        self._processor_s = 0.0
        self._root_s = 0.0
        self._wall_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self._processor_s, self._root_s, self._wall_s = -self._processor(), -_cpu_s(self._pid), -time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._processor_s += self._processor()
        self._root_s += _cpu_s(self._pid)
        self._wall_s += time.monotonic()

    def result(self) -> dict[str, float]:
        """Processor seconds do not depend on what else the machine does, unlike every other figure.

        ``root_cpu_s`` are those of the launched process alone: where workers are processes, what the service costs.
        """
        return {
            "peak_pss_mib": round(self._peak, 1),
            "server_cpu_s": round(self._processor_s, 2),
            "cores_used": round(self._processor_s / self._wall_s, 2),
            "root_cpu_s": round(self._root_s, 2),
        }

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, sum(pss_mib(process) for process in tree(self._pid)))
            if self._done.wait(EVERY_S):
                return

    def _processor(self) -> float:
        return sum(_cpu_s(process.pid) for process in tree(self._pid))


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def _short(words: list[str]) -> str:
    """A command line without the directories of the machine."""
    return " ".join(word.rstrip("/").rpartition("/")[2] for word in words)[:80]
