"""kill -9 while all parameters of a base are trained: nothing differs from an undisturbed run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tinker

import gradserve
from gradserve.client.embedded import EmbeddedServer
from tests.processes import serve_on, stop
from tests.recovery.test_kill import LONG, SHORT, KillDuring, workers
from tests.sdk import adam, client, logprobs, prompt


@pytest.fixture(scope="module")
def own_server(tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server whose workers may be killed."""
    running = EmbeddedServer({"tiny": tiny_models["tiny"]}, tmp_path_factory.mktemp("data"))
    yield running
    running.stop()


def final(run: tinker.TrainingClient) -> list[list[float]]:
    return [row.tolist() for row in logprobs(run.forward(LONG[:8], "cross_entropy").result())]


def script(server: EmbeddedServer, disturb: bool) -> tuple[list[list[float]], list[list[int]]]:
    """With ``disturb`` the worker is killed in a gradient, in an optimizer step and while it samples."""
    run = gradserve.create_full_training_client(client(server.url), "tiny").result()
    if disturb:
        with KillDuring(server) as kills:
            run.forward_backward(LONG, "cross_entropy").result()
        assert kills
    else:
        run.forward_backward(LONG, "cross_entropy").result()
    if disturb:  # stopped, so that the step is certainly in the worker's hands
        worker = psutil.Process(next(w["pid"] for w in workers(server) if w["phase"] == "ready"))
        worker.suspend()
        step = run.optim_step(adam(1e-3))
        time.sleep(0.5)
        worker.kill()
        step.result()
    else:
        run.optim_step(adam(1e-3)).result()
    run.forward_backward(SHORT, "cross_entropy").result()
    run.optim_step(adam(1e-3)).result()
    sampler = run.save_weights_and_get_sampling_client().result()
    parameters = tinker.SamplingParams(max_tokens=200, seed=5, stop=[])
    futures = [sampler.sample(prompt([30 + n, 40, 50]), 4, parameters) for n in range(4)]
    if disturb:
        with KillDuring(server) as kills:
            samples = [list(sequence.tokens) for future in futures for sequence in future.result().sequences]
    else:
        samples = [list(sequence.tokens) for future in futures for sequence in future.result().sequences]
    return final(run), samples


def test_a_killed_worker_changes_nothing(own_server: EmbeddedServer) -> None:
    undisturbed = script(own_server, disturb=False)
    restarts = sum(worker["restarts"] for worker in workers(own_server))
    assert script(own_server, disturb=True) == undisturbed
    assert sum(worker["restarts"] for worker in workers(own_server)) >= restarts + 2


def test_a_killed_server_loses_nothing(tiny_models: dict[str, str], data_dir: Path) -> None:
    """The new server finishes what was in flight; half-written objects of the old one are swept."""
    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
    try:
        service = client(f"http://127.0.0.1:{port}")
        run = gradserve.create_full_training_client(service, "tiny").result()
        run.forward_backward(SHORT, "cross_entropy").result()
        run.optim_step(adam(1e-3)).result()
        in_flight = run.forward_backward(LONG, "cross_entropy")
        step = run.optim_step(adam(1e-3))
        time.sleep(0.3)
        server.kill()
        server.wait()
        _, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir, port)
        assert len(in_flight.result().loss_fn_outputs) == len(LONG)
        assert step.result().metrics["grad_norm"] > 0  # type: ignore[index]
        reference = gradserve.create_full_training_client(service, "tiny").result()
        for data in (SHORT, LONG):
            reference.forward_backward(data, "cross_entropy").result()
            reference.optim_step(adam(1e-3)).result()
        assert final(reference) == final(run)
    finally:
        stop(server)
