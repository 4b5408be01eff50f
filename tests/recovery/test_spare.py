"""A warm spare: after kill -9 of the server its successor's workers are forked from a process that has all loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import psutil

from gradserve.client.embedded import EmbeddedServer
from tests.processes import serve_on, stop
from tests.sdk import adam, client, logprobs, supervised

DATA = supervised(4, seed=51)


def worker_of(url: str) -> psutil.Process:
    """The server's one worker, as soon as it is ready."""
    run = client(url).create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    run.forward(DATA, "cross_entropy").result()
    (worker,) = health(url)
    return psutil.Process(worker["pid"])


def health(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/api/v1/healthz").json()["workers"]
    return found


def zygote_of(worker: psutil.Process) -> psutil.Process:
    parent = worker.parent()
    assert parent is not None
    assert "gradserve.compute.zygote" in parent.cmdline()
    return parent


def gone(*processes: psutil.Process) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return not alive


def test_a_new_server_takes_over_what_the_killed_one_had_loaded(tiny_models: dict[str, str], data_dir: Path) -> None:
    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
    url = f"http://127.0.0.1:{port}"
    old = worker_of(url)
    zygote = zygote_of(old)
    server.kill()
    server.wait()
    assert gone(old), "its pipe is closed"
    assert zygote.is_running()
    _, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir, port)
    new = worker_of(url)
    assert zygote_of(new) == zygote
    stop(server)
    assert gone(new, zygote)


def test_a_server_of_another_configuration_replaces_it(tiny_models: dict[str, str], data_dir: Path) -> None:
    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
    url = f"http://127.0.0.1:{port}"
    old = zygote_of(worker_of(url))
    server.kill()
    server.wait()
    _, server = serve_on({"tiny": tiny_models["tiny-qwen"]}, data_dir, port)
    try:
        new = zygote_of(worker_of(url))
        assert new != old
        assert gone(old)
    finally:
        stop(server)
    assert gone(new)


def test_without_a_next_server_it_ends_by_itself(tiny_models: dict[str, str], data_dir: Path) -> None:
    """An embedded server's waits a few seconds only. The worker is stopped, so that it can't end by itself."""
    server = EmbeddedServer({"tiny": tiny_models["tiny"]}, data_dir)
    worker = worker_of(server.url)
    zygote = zygote_of(worker)
    worker.suspend()
    psutil.Process(server.pid).kill()
    server.stop()
    assert gone(worker, zygote)


def test_training_goes_on_as_if_nothing_had_happened(tiny_models: dict[str, str], data_dir: Path) -> None:
    """Two kills, of the server and then of a worker that was forked from shared weights: the same numbers."""

    def steps(url: str, disturb: Any) -> list[list[float]]:
        run = client(url).create_lora_training_client(base_model="tiny", rank=8, seed=5).result()
        for n in range(3):
            run.forward_backward(DATA, "cross_entropy").result()
            disturb(n)
            run.optim_step(adam(1e-2)).result()
        return [row.tolist() for row in logprobs(run.forward(DATA, "cross_entropy").result())]

    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
    url = f"http://127.0.0.1:{port}"

    def kill(n: int) -> None:
        nonlocal server
        if n == 1:
            server.kill()
            server.wait()
            _, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir, port)
        if n == 2:
            worker_of(url).kill()

    try:
        assert steps(url, kill) == steps(url, lambda n: None)
    finally:
        stop(server)
