"""A server on a port of its own that can be killed in every way, and be started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from gradserve.compute.objects import shared_memory_root
from tests.processes import free_port, serve_on, stop

HEADERS = {"X-API-Key": "tml-test"}


class Machine:
    """One machine with a gradserve on it."""

    def __init__(self, models: dict[str, str], data_dir: Path, **environment: str) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self._models = models
        self._environment = environment
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, models: dict[str, str] | None = None) -> None:
        """Again, maybe with other models than before."""
        self._models = models or self._models
        _, self.server = serve_on(self._models, self.data_dir, self.port, **self._environment)

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/api/v1/healthz").json()
        return found

    def get(self, path: str) -> Any:
        """A route under /api/v1/gradserve."""
        answer = httpx.get(f"{self.url}/api/v1/gradserve/{path}", headers=HEADERS)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The same, with a JSON body."""
        answer = httpx.post(f"{self.url}/api/v1/gradserve/{path}", headers=HEADERS, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, run_id: str) -> list[dict[str, Any]]:
        """Of a run, newest first."""
        found: list[dict[str, Any]] = self.get(f"runs/{run_id}/events")["events"]
        return found

    def worker_pids(self) -> list[int]:
        return [worker["pid"] for worker in self.health()["workers"] if worker["pid"]]

    def kill_workers(self) -> None:
        for pid in self.worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """In order, as by a service manager."""
        stop(self.server)

    def kill_server(self) -> None:
        self.server.kill()
        self.server.wait()

    def cut_power(self) -> None:
        """Every process is gone, and so is what was in shared memory."""
        pids = self.worker_pids()
        self.kill_server()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(shared_memory_root(self.data_dir))


@contextlib.contextmanager
def machine(models: dict[str, str], data_dir: Path, **environment: str) -> Iterator[Machine]:
    """A machine for the block; its server is stopped in order at the end."""
    made = Machine(models, data_dir, **environment)
    try:
        yield made
    finally:
        if made.server.poll() is None:
            stop(made.server)
