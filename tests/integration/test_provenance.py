"""Every result says which version of which weights made it; no legal order of requests mixes versions."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import httpx
import pytest
from tinker.proto import tinker_public_pb2 as pb

from gradserve.client.embedded import EmbeddedServer
from tests.sdk import adam, client, logprobs, supervised, train

SHORT = supervised(3, seed=5)


class Rest:
    """The server without the SDK."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-test"}, timeout=60)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def result(self, request_id: str) -> httpx.Response:
        poll = {"request_id": request_id, "allow_metadata_only": False}
        while (answer := self.http.post("retrieve_future", json=poll)).status_code == 408:
            continue
        return answer

    def sample(self, number: int, session: str, **target: str) -> httpx.Response:
        opened = self.post("create_sampling_session", session_id=session, sampling_session_seq_id=number, **target)[
            "sampling_session_id"
        ]
        tokens = {"chunks": [{"type": "encoded_text", "tokens": [30, 31, 32]}]}
        params = {"max_tokens": 3, "seed": 1}
        asked = self.post("asample", sampling_session_id=opened, seq_id=0, prompt=tokens, sampling_params=params)
        return self.result(asked["request_id"])

    def detail(self, run: str) -> Any:
        return self.http.get(f"gradserve/runs/{run}").json()


@pytest.fixture
def rest(url: str) -> Rest:
    return Rest(url)


def test_samples_carry_version_and_digest_of_their_checkpoint(url: str, rest: Rest) -> None:
    run = client(url).create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
    paths = []
    for name in ("a", "b"):
        train(run, SHORT, steps=2)
        paths.append(run.save_weights_for_sampler(name).result().path)
    session = rest.post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
    answers = [rest.sample(number, session, model_path=path) for number, path in enumerate(paths)]
    saved = {c["name"]: (c["weights"], str(c["version"])) for c in rest.detail(str(run.model_id))["checkpoints"]}
    seen = [(a.headers["x-gradserve-weights"], a.headers["x-gradserve-version"]) for a in answers]
    assert seen == [saved["a"], saved["b"]]
    assert [version for _, version in seen] == ["2", "4"]
    assert seen[0][0] != seen[1][0]
    for answer in answers:
        assert len(pb.SampleResponse.FromString(answer.content).sequences[0].tokens) == 3 * 4

    base = rest.sample(2, session, base_model="tiny")
    assert base.status_code == 200
    assert "x-gradserve-weights" not in base.headers
    assert "x-gradserve-version" not in base.headers


def test_forward_backward_says_which_weights_it_was_taken_at(url: str, rest: Rest) -> None:
    run = client(url).create_lora_training_client(base_model="tiny", rank=4, seed=4).result()
    run.forward(SHORT, "cross_entropy").result()  # seq 1, 2: forward_backward, 3: the step, 4: forward
    run.forward_backward(SHORT, "cross_entropy").result()
    start = rest.detail(str(run.model_id))["run"]["weights"]
    run.optim_step(adam()).result()
    run.forward(SHORT, "cross_entropy").result()
    answers = [rest.result(f"{run.model_id}:op:{seq}") for seq in (1, 2, 4)]
    now = rest.detail(str(run.model_id))["run"]
    seen = [(a.headers["x-gradserve-weights"], a.headers["x-gradserve-version"]) for a in answers]
    assert seen == [(start, "0"), (start, "0"), (now["weights"], "1")]
    step = rest.result(f"{run.model_id}:op:3")
    assert "x-gradserve-weights" not in step.headers, "a step is computed with two versions"


def test_no_legal_order_of_requests_is_refused(url: str) -> None:
    """Gradients wait while weights are saved, loaded, sampled from; a load with optimizer brings its own moments."""
    service = client(url)
    run = service.create_lora_training_client(base_model="tiny", rank=4, seed=5).result()
    states = [run.save_state("start").result().path]
    rng = random.Random(8)
    futures: list[Any] = []
    for number in range(60):
        kind = rng.choice(["fb", "fb", "fb", "optim", "optim", "save", "load", "load_optimizer", "sampler", "forward"])
        if kind == "fb":
            futures.append(run.forward_backward(SHORT, "cross_entropy"))
        elif kind == "optim":
            futures.append(run.optim_step(adam()))
        elif kind == "save":
            states.append(run.save_state(f"s{number}").result().path)
        elif kind == "load":
            futures.append(run.load_state(rng.choice(states)))
        elif kind == "load_optimizer":
            futures.append(run.load_state_with_optimizer(rng.choice(states)))
        elif kind == "sampler":
            run.save_weights_and_get_sampling_client().result()
        else:
            futures.append(run.forward(SHORT, "cross_entropy"))
    for future in futures:
        future.result()
    forked = service.create_training_client_from_state_with_optimizer(states[-1]).result()
    train(forked, SHORT, steps=2)


def test_damaged_weights_are_found_and_computed_again(
    tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The whole road: a bit flips in shared memory; the request that meets it gets the numbers that it should."""
    from gradserve.compute.objects import shared_memory_root

    data = tmp_path_factory.mktemp("data")
    server = EmbeddedServer({"tiny": tiny_models["tiny"]}, data)
    try:
        run = client(server.url).create_lora_training_client(base_model="tiny", rank=4, seed=6).result()
        train(run, SHORT, steps=1)
        rest = Rest(server.url)
        wanted = logprobs(run.forward(SHORT, "cross_entropy").result())
        before = rest.detail(str(run.model_id))
        file = shared_memory_root(data) / f"{before['run']['weights']}.safetensors"
        damaged = bytearray(file.read_bytes())
        damaged[-50] ^= 4
        file.unlink()
        file.write_bytes(bytes(damaged))
        for worker in httpx.get(f"{server.url}/api/v1/healthz").json()["workers"]:
            os.kill(worker["pid"], signal.SIGKILL)  # it still had the good bytes in its cache
        found = logprobs(run.forward(SHORT, "cross_entropy").result())
        assert [row.tolist() for row in found] == [row.tolist() for row in wanted]
        after = rest.detail(str(run.model_id))
        assert after["run"]["weights"] == before["run"]["weights"]
        assert after["total"]["lines"] == before["total"]["lines"] + 1, "what was computed again is not billed"
        assert "recovered" in [event["kind"] for event in after["events"]]
    finally:
        server.stop()
