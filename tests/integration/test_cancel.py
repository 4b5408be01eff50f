"""Cancelling with the public SDK: the worker is free again, the journal knows, nobody pays."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
import tinker

from gradserve.client.embedded import EmbeddedServer
from tests.sdk import adam, client, prompt, supervised

LONG = tinker.SamplingParams(max_tokens=480, seed=1, stop=[])
SAMPLES = 500
"""240,000 tokens: minutes of work, so that it is certainly running when it is cancelled."""
SHORT = tinker.SamplingParams(max_tokens=3, seed=1, stop=[])


@pytest.fixture
def rest(url: str) -> httpx.Client:
    return httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-test"}, timeout=60)


def outcome(rest: httpx.Client, request_id: str) -> Any:
    """What the future answers in the end."""
    while True:
        answer = rest.post("retrieve_future", json={"request_id": request_id, "allow_metadata_only": False})
        if answer.status_code != 408:
            return answer.json()


def sampled(rest: httpx.Client, run: str) -> list[int]:
    """Tokens of each billed sample of a run."""
    lines = rest.get(f"gradserve/runs/{run}?lines=100").json()["lines"]
    return [line["sample_tokens"] for line in lines if line["kind"] == "sample"]


def asked(rest: httpx.Client, session: str) -> str:
    """A long sample, sent without the SDK; its request id."""
    body = {
        "sampling_session_id": session,
        "seq_id": 7,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [30, 31]}]},
        "num_samples": SAMPLES,
        "sampling_params": {"max_tokens": 480, "seed": 1, "stop": []},
    }
    return str(rest.post("asample", json=body).json()["request_id"])


def test_an_abandoned_sample_is_dropped_everywhere(url: str, rest: httpx.Client) -> None:
    run = client(url).create_lora_training_client(base_model="tiny", rank=4).result()
    sampler = run.save_weights_and_get_sampling_client().result()
    assert len(sampler.sample(prompt([30, 31]), 1, SHORT).result().sequences[0].tokens) == 3
    future = sampler.sample(prompt([30, 31]), SAMPLES, LONG)
    time.sleep(1.0)  # sent, accepted and running
    future.future().cancel()
    assert len(sampler.sample(prompt([30, 31]), 1, SHORT).result().sequences[0].tokens) == 3
    told = outcome(rest, f"{sampler._sampling_session_id}:op:1")
    assert (told["code"], told["category"]) == ("op.cancelled", "user")
    assert sampled(rest, str(run.model_id)) == [3, 3]


def test_cancelled_by_hand_a_waiting_client_is_told_once(url: str, rest: httpx.Client) -> None:
    """Not 410: that makes the SDK send the request again under a new number."""
    run = client(url).create_lora_training_client(base_model="tiny", rank=4).result()
    sampler = run.save_weights_and_get_sampling_client().result()
    future = sampler.sample(prompt([30, 31]), SAMPLES, LONG)
    time.sleep(1.0)
    request_id = f"{sampler._sampling_session_id}:op:0"
    assert rest.post("cancel_future", json={"request_id": request_id}).json()["cancelled"] is True
    with pytest.raises(tinker.RequestFailedError, match="cancelled"):
        future.result()
    assert sampled(rest, str(run.model_id)) == []


def test_a_training_request_that_ran_is_left(url: str, rest: httpx.Client) -> None:
    run = client(url).create_lora_training_client(base_model="tiny", rank=4).result()
    run.forward_backward(supervised(2), "cross_entropy").result()
    answer = rest.post("cancel_future", json={"request_id": f"{run.model_id}:op:1"})
    assert (answer.status_code, answer.json()["cancelled"], answer.json()["state"]) == (200, False, "done")
    assert run.optim_step(adam()).result().metrics["grad_norm"] > 0  # type: ignore[index]


def test_a_cancel_survives_a_restart(tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    data = tmp_path_factory.mktemp("data")
    server = EmbeddedServer({"tiny": tiny_models["tiny"]}, data)
    try:
        sampler = client(server.url).create_sampling_client(base_model="tiny").result()
        session = sampler._sampling_session_id
        rest = httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": "tml-test"}, timeout=60)
        request_id = asked(rest, session)
        assert rest.post("cancel_future", json={"request_id": request_id}).json()["cancelled"] is True
    finally:
        server.stop()
    again = EmbeddedServer({"tiny": tiny_models["tiny"]}, data)
    try:
        rest = httpx.Client(base_url=f"{again.url}/api/v1/", headers={"X-API-Key": "tml-test"}, timeout=60)
        assert outcome(rest, request_id)["code"] == "op.cancelled"
        assert asked(rest, session) == request_id, "a replay is the same request: it stays cancelled"
        assert rest.get("gradserve/ledger").json()["total"]["lines"] == 0
    finally:
        again.stop()
