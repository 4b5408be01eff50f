"""What only a raw client does: sequence numbers out of order, the same request again, results read twice."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tests.sdk import client, sequences

HEADERS = {"X-API-Key": "tml-test"}


class Raw:
    """One run, spoken to without the SDK."""

    def __init__(self, url: str) -> None:
        run = client(url).create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        assert run.model_id is not None
        self.run = run.model_id
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers=HEADERS, timeout=60)

    def forward_backward(self, seq: int, tokens: list[int]) -> httpx.Response:
        import numpy as np

        request = pb.ForwardBackwardRequest(model_id=self.run, seq_id=seq, loss_fn="cross_entropy")
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        target = datum.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = np.array(tokens, "<i8").tobytes(), pb.DTYPE_INT64
        target.shape.append(len(tokens))
        return self.http.post(
            "forward_backward",
            content=request.SerializeToString(),
            headers={"Content-Type": "application/x-protobuf"},
        )

    def optim_step(self, seq: int, learning_rate: float = 1e-2) -> httpx.Response:
        body = {"model_id": self.run, "seq_id": seq, "adam_params": {"learning_rate": learning_rate}}
        return self.http.post("optim_step", json=body)

    def result(self, answer: httpx.Response) -> httpx.Response:
        answer.raise_for_status()
        poll = {"request_id": answer.json()["request_id"], "allow_metadata_only": False}
        while (response := self.http.post("retrieve_future", json=poll)).status_code == 408:
            continue
        return response

    def weights(self) -> Any:
        total: Any = self.http.get(f"gradserve/runs/{self.run}").json()
        return total["run"]["version"], total["run"]["weights"]


@pytest.fixture
def raw(url: str) -> Raw:
    return Raw(url)


ROWS = sequences(3, seed=77)


def test_out_of_order_arrival_is_in_order_execution(url: str) -> None:
    """Traps 9 and 8: the first chunk comes last, a rejected seq is consumed; the outcome is that of seq order."""
    shuffled = Raw(url)
    later = [shuffled.optim_step(4), shuffled.forward_backward(2, ROWS[1])]
    refused = shuffled.forward_backward(3, [10_000])
    assert refused.status_code == 400
    assert refused.json()["field"] == "data[0].model_input"
    for answer in later:
        poll = {"request_id": answer.json()["request_id"], "allow_metadata_only": False}
        with pytest.raises(httpx.ReadTimeout):  # parked: seq 1 is missing
            shuffled.http.post("retrieve_future", json=poll, timeout=1)
    first = shuffled.forward_backward(1, ROWS[2])
    for answer in (first, *later):
        assert shuffled.result(answer).status_code == 200
    assert shuffled.weights()[0] == 1

    same = Raw(url)
    same.result(same.forward_backward(1, ROWS[2]))
    same.result(same.forward_backward(2, ROWS[1]))
    same.result(same.optim_step(3))
    assert shuffled.weights() == same.weights()


def test_a_replay_is_the_same_request(raw: Raw) -> None:
    first = raw.forward_backward(1, ROWS[0])
    again = raw.forward_backward(1, ROWS[0])
    assert first.json() == again.json()
    assert raw.result(first).content == raw.result(again).content
    step = raw.result(raw.optim_step(2))
    assert raw.result(raw.optim_step(2)).content == step.content
    assert raw.weights()[0] == 1, "one step, however often it was sent"
    other = raw.optim_step(2, learning_rate=1.0)
    assert (other.status_code, other.json()["code"]) == (400, "op.conflict")


def test_compressed_bodies(raw: Raw) -> None:
    import zstandard

    request = pb.ForwardBackwardRequest(model_id=raw.run, seq_id=1, loss_fn="cross_entropy")
    body = zstandard.compress(request.SerializeToString())
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    refused = raw.http.post("forward_backward", content=body, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (400, "data.empty")
