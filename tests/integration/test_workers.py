"""One worker or several: the same arrays, to the bit. Gradients are folded in Task order, whoever computed them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import tinker
import torch

from tests.processes import serve_on, stop
from tests.sdk import adam, prompt, supervised

DATA = supervised(24, seed=41)


@pytest.fixture
def outcomes(tiny_models: dict[str, str], tmp_path: Path) -> list[tuple[str, list[list[int]]]]:
    """The digest of the final weights and some samples, on one worker and on two. About fifteen Tasks a request."""
    found = []
    for workers in ("1", "2"):
        settings = {"GRADSERVE_WORKERS": workers, "GRADSERVE_TASK_TOKENS": "24"}
        port, server = serve_on({"tiny": tiny_models["tiny"]}, tmp_path / workers, None, **settings)
        try:
            url = f"http://127.0.0.1:{port}"
            service = tinker.ServiceClient(base_url=url, api_key="tml-test")
            run = service.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
            for _ in range(3):
                halves = [run.forward_backward(half, "cross_entropy") for half in (DATA[:12], DATA[12:])]
                run.optim_step(adam(1e-2)).result()
                assert all(future.result().loss_fn_outputs for future in halves)
            sampler = run.save_weights_and_get_sampling_client().result()
            parameters = tinker.SamplingParams(max_tokens=10, seed=7, stop=[])
            samples = sampler.sample(prompt([30, 40, 50]), 3, parameters).result().sequences
            answer = httpx.get(f"{url}/api/v1/gradserve/runs/{run.model_id}", headers={"X-API-Key": "tml-test"})
            assert len(httpx.get(f"{url}/api/v1/healthz").json()["workers"]) == int(workers)
            found.append((answer.json()["run"]["weights"], [list(sequence.tokens) for sequence in samples]))
        finally:
            stop(server)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it can start")
def test_clients_are_told_that_workers_cannot_start(tiny_models: dict[str, str], data_dir: Path) -> None:
    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir, None, GRADSERVE_DEVICE="cuda")
    try:
        service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-test")
        with pytest.raises(tinker.RequestFailedError, match=r"No worker can start.*torch sees no CUDA device"):
            service.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
        (worker,) = httpx.get(f"http://127.0.0.1:{port}/api/v1/healthz").json()["workers"]
        assert worker["failed_starts"] >= 5
    finally:
        stop(server)


def test_two_workers_give_what_one_gives(outcomes: list[tuple[str, list[list[int]]]]) -> None:
    one, two = outcomes
    assert one == two
