"""What the scenarios share: the server as a child process, the client, batches, medians."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker  # reads the variable above
from tinker import types

API_KEY = os.environ.get("TINKER_API_KEY", "tml-benchmark-key-0000")
HEALTH = "/api/v1/healthz"
START_LIMIT_S = 300.0
REPLY_LIMIT_S = 600.0
SMALLEST_ID = 8
"""Random tokens start here: the ids below are special in the tiny model."""


@dataclass(frozen=True)
class Target:
    """What to ask for. ``Target("http://127.0.0.1:8000", "tiny", vocab=1024, rank=8)``"""

    base_url: str
    model: str
    vocab: int
    rank: int


@dataclass(frozen=True)
class Launch:
    """How to start a server: ``{port}``, ``{url}`` and ``{data}`` (a new empty directory) are filled in each time."""

    command: str
    log: Path


@dataclass(frozen=True)
class Running:
    """A started server and the moment it was started, on the clock of ``time.monotonic``."""

    process: subprocess.Popen[bytes]
    base_url: str
    started: float

    def wait_until_healthy(self) -> float:
        """Seconds from the start to the first good answer of the health route."""
        while not answers(self.base_url + HEALTH):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}; see its log")
            if time.monotonic() - self.started > START_LIMIT_S:
                raise RuntimeError(f"the server was not healthy within {START_LIMIT_S:.0f} s; see its log")
            time.sleep(0.05)
        return time.monotonic() - self.started


@contextmanager
def started(launch: Launch) -> Iterator[Running]:
    """A server with fresh state; the whole process tree is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as data, launch.log.open("ab") as log:
        port = free_port()
        base_url = f"http://127.0.0.1:{port}"
        command = launch.command.replace("{port}", str(port)).replace("{url}", base_url).replace("{data}", data)
        began = time.monotonic()
        process = subprocess.Popen(shlex.split(command), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield Running(process, base_url, began)
        finally:
            kill_tree(process)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a GET succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGINT to the root, a moment to clean up, then SIGKILL to all that is left of its tree."""
    members = tree(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    psutil.wait_procs(members, timeout=5)
    for member in members:
        with contextlib.suppress(psutil.Error):
            member.kill()
    psutil.wait_procs(members, timeout=5)
    process.wait()


def training_client(target: Target) -> tinker.TrainingClient:
    """A new session with one new LoRA adapter."""
    service = tinker.ServiceClient(base_url=target.base_url, api_key=API_KEY)
    client: tinker.TrainingClient = ready(service.create_lora_training_client(target.model, rank=target.rank))
    return client


def ready(client: Any) -> Any:
    """A client from what the SDK's makers return: a future in new versions, the client itself in old ones."""
    return client.result(timeout=REPLY_LIMIT_S) if hasattr(client, "result") else client


def first_training_client(target: Target) -> tinker.TrainingClient:
    """The same, from a server that may call itself healthy before it has its model."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            return training_client(target)
        except tinker.TinkerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def random_tokens(rows: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """``rows`` lists of ``length`` uniform ids; the same for the same arguments."""
    draw = random.Random(seed)
    return [[draw.randrange(SMALLEST_ID, vocab) for _ in range(length)] for _ in range(rows)]


def supervised_batch(rows: int, length: int, vocab: int) -> list[types.Datum]:
    """Sequences whose targets are their own next tokens (the last wraps round), every token weighing one."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(np.asarray([*tokens[1:], tokens[0]], dtype=np.int64)),
                "weights": types.TensorData.from_numpy(np.ones(length, dtype=np.float32)),
            },
        )
        for tokens in random_tokens(rows, length, vocab)
    ]


def mean_nll(output: types.ForwardBackwardOutput) -> float:
    """Mean negative log-probability over all tokens of an answer to a ``supervised_batch``."""
    logprobs: list[float] = [value for row in output.loss_fn_outputs for value in row["logprobs"].tolist()]
    return -sum(logprobs) / len(logprobs)


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median, least and greatest."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }
