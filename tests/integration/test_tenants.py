"""Several clients' small requests share passes in the worker, and each run ends with the very weights it gets alone."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import tinker

from gradserve.client.embedded import EmbeddedServer
from tests.sdk import adam, client, datum, sequences, supervised

TENANTS, STEPS = 6, 3
TOKENS = 24


def new_run(url: str, tenant: int) -> tinker.TrainingClient:
    run: tinker.TrainingClient = (
        client(url).create_lora_training_client(base_model="tiny", rank=2 + tenant, seed=tenant).result()
    )
    return run


def detail(url: str, run: tinker.TrainingClient) -> dict[str, Any]:
    path = f"{url}/api/v1/gradserve/runs/{run.model_id}?lines=100"
    found: dict[str, Any] = httpx.get(path, headers={"X-API-Key": "tml-test"}).json()
    return found


def steps(run: tinker.TrainingClient, tenant: int) -> None:
    for step in range(STEPS):
        rows = sequences(2, seed=10 * tenant + step, shortest=TOKENS // 2, longest=TOKENS // 2)
        gradient = run.forward_backward([datum(row, weights=[1.0] * len(row)) for row in rows], "cross_entropy")
        update = run.optim_step(adam(1e-2))
        gradient.result()
        update.result()


def test_runs_side_by_side_are_each_run_alone(server: EmbeddedServer) -> None:
    alone = []
    for tenant in range(TENANTS):
        run = new_run(server.url, tenant)
        steps(run, tenant)
        alone.append(detail(server.url, run)["run"]["weights"])

    runs = [new_run(server.url, tenant) for tenant in range(TENANTS)]
    busy = new_run(server.url, 99)
    long = busy.forward_backward(supervised(60, shortest=250, longest=250), "cross_entropy")
    threads = [threading.Thread(target=steps, args=(run, tenant)) for tenant, run in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    long.result()
    found = [detail(server.url, run) for run in runs]
    assert [one["run"]["weights"] for one in found] == alone

    # A pass's time is divided by tokens: the equal Tasks of one pass have equal times, of two passes never.
    times = [line["compute_ms"] for one in found for line in one["lines"] if line["kind"] == "forward_backward"]
    assert len(times) == TENANTS * STEPS
    assert len({round(float(time), 2) for time in times}) < len(times), f"no two requests shared a pass: {times}"
