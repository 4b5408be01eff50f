"""kill -9 in the middle: the client's script goes on without an error, and nothing differs from an undisturbed run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tinker

from gradserve.client.embedded import EmbeddedServer
from tests.sdk import adam, client, logprobs, prompt, supervised

# Enough work in one request that a kill lands in the middle of it.
LONG = supervised(160, seed=31, shortest=60, longest=120)
SHORT = supervised(4, seed=32)


@pytest.fixture(scope="module")
def own_server(tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server whose workers may be killed."""
    running = EmbeddedServer({"tiny": tiny_models["tiny"]}, tmp_path_factory.mktemp("data"))
    yield running
    running.stop()


def workers(server: EmbeddedServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{server.url}/api/v1/healthz").json()["workers"]
    return found


def kill_worker_when_busy(server: EmbeddedServer, kills: list[int], stop: threading.Event) -> None:
    """Kill the worker as soon as it has used some CPU since now: then it is in the middle of something."""
    pid = next(worker["pid"] for worker in workers(server) if worker["phase"] == "ready")
    process = psutil.Process(pid)
    spent = sum(process.cpu_times()[:2])
    while not stop.is_set():
        if sum(process.cpu_times()[:2]) > spent + 0.05:
            process.kill()
            kills.append(pid)
            return
        time.sleep(0.002)


class KillDuring:
    """``with KillDuring(server) as kills:`` kills the worker once while the block runs."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self.kills: list[int] = []

    def __enter__(self) -> list[int]:
        self._thread = threading.Thread(target=kill_worker_when_busy, args=(self._server, self.kills, self._stop))
        self._thread.start()
        return self.kills

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def script(server: EmbeddedServer, disturb: bool) -> tuple[list[list[float]], list[list[int]]]:
    """Train, sample; with ``disturb`` the worker is killed during each of the three kinds of work."""
    run = client(server.url).create_lora_training_client(base_model="tiny", rank=8, seed=17).result()
    run.forward_backward(SHORT, "cross_entropy").result()
    run.optim_step(adam(1e-2)).result()

    def forward_backward() -> None:
        run.forward_backward(LONG, "cross_entropy").result()

    def optim_step() -> None:
        run.optim_step(adam(1e-2)).result()

    def sample() -> list[list[int]]:
        sampler = run.save_weights_and_get_sampling_client().result()
        parameters = tinker.SamplingParams(max_tokens=200, seed=5, stop=[])
        futures = [sampler.sample(prompt([30 + n, 40, 50]), 4, parameters) for n in range(4)]
        return [list(sequence.tokens) for future in futures for sequence in future.result().sequences]

    samples: list[list[int]] = []
    for work in (forward_backward, optim_step, sample):
        if disturb:
            with KillDuring(server) as kills:
                samples = work() or samples
                # an optimizer step of a tiny model may be too short to be caught: then the next work is disturbed
            assert kills or work is optim_step
        else:
            samples = work() or samples
    final = [row.tolist() for row in logprobs(run.forward(LONG[:8], "cross_entropy").result())]
    return final, samples


def test_a_killed_worker_changes_nothing(own_server: EmbeddedServer) -> None:
    undisturbed = script(own_server, disturb=False)
    restarts = sum(worker["restarts"] for worker in workers(own_server))
    disturbed = script(own_server, disturb=True)
    assert disturbed == undisturbed
    after = workers(own_server)
    assert sum(worker["restarts"] for worker in after) >= restarts + 2
    assert any("SIGKILL" in (worker["last_exit"] or "") for worker in after)


def test_an_optim_step_in_flight_is_done_exactly_once(own_server: EmbeddedServer) -> None:
    """The worker is stopped, so that the step is certainly in its hands, and then killed."""

    def steps(disturb: bool) -> list[list[float]]:
        run = client(own_server.url).create_lora_training_client(base_model="tiny", rank=8, seed=19).result()
        for n in range(3):
            run.forward_backward(SHORT, "cross_entropy").result()
            if disturb and n == 1:
                worker = psutil.Process(next(w["pid"] for w in workers(own_server) if w["phase"] == "ready"))
                worker.suspend()
                future = run.optim_step(adam(1e-2))
                time.sleep(0.5)
                worker.kill()
                future.result()
            else:
                run.optim_step(adam(1e-2)).result()
        return [row.tolist() for row in logprobs(run.forward(SHORT, "cross_entropy").result())]

    assert steps(disturb=True) == steps(disturb=False)


def test_a_restarted_server_goes_on(tiny_models: dict[str, str], data_dir: Path) -> None:
    """kill -9 of the server: a new one on the same data directory and port finishes what was accepted."""
    from tests.processes import serve_on, stop

    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
    try:
        service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-test")
        run = service.create_lora_training_client(base_model="tiny", rank=8, seed=23).result()
        run.forward_backward(SHORT, "cross_entropy").result()
        run.optim_step(adam(1e-2)).result()
        before = [row.tolist() for row in logprobs(run.forward(SHORT, "cross_entropy").result())]
        in_flight = run.forward_backward(LONG, "cross_entropy")
        step = run.optim_step(adam(1e-2))
        time.sleep(0.3)
        server.kill()
        server.wait()
        _, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir, port)
        assert len(in_flight.result().loss_fn_outputs) == len(LONG)
        assert step.result().metrics["grad_norm"] > 0  # type: ignore[index]
        after = [row.tolist() for row in logprobs(run.forward(SHORT, "cross_entropy").result())]
        assert after != before
        reference = service.create_lora_training_client(base_model="tiny", rank=8, seed=23).result()
        for data in (SHORT, LONG):
            reference.forward_backward(data, "cross_entropy").result()
            reference.optim_step(adam(1e-2)).result()
        assert [row.tolist() for row in logprobs(reference.forward(SHORT, "cross_entropy").result())] == after
    finally:
        stop(server)


def test_results_and_weights_survive_an_orderly_restart(tiny_models: dict[str, str], data_dir: Path) -> None:
    """Stopping gives shared memory back; the next server finds weights, gradients and old results on disk."""
    from tests.processes import serve_on, stop

    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
    service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-test")
    run = service.create_lora_training_client(base_model="tiny", rank=8, seed=29).result()
    run.forward_backward(SHORT, "cross_entropy").result()
    run.optim_step(adam(1e-2)).result()
    before = [row.tolist() for row in logprobs(run.forward(SHORT, "cross_entropy").result())]
    run.forward_backward(SHORT, "cross_entropy").result()
    stop(server)
    _, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir, port)
    try:
        poll = {"request_id": f"{run.model_id}:op:1", "allow_metadata_only": False}
        headers = {"X-API-Key": "tml-test"}
        old = httpx.post(f"http://127.0.0.1:{port}/api/v1/retrieve_future", json=poll, headers=headers)
        assert old.status_code == 200
        assert old.headers["content-type"] == "application/x-protobuf"
        assert [row.tolist() for row in logprobs(run.forward(SHORT, "cross_entropy").result())] == before
        metrics = run.optim_step(adam(1e-2)).result().metrics
        assert metrics is not None
        assert metrics["grad_norm"] > 0
    finally:
        stop(server)
