"""The ten things that break a naive server (PROTOCOL.md section 0), as far as the gateway can show them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from gradserve.wire import codec
from gradserve.wire.data import Array
from gradserve.wire.ops import ForwardBackward, decode_body
from gradserve.wire.proto import gradserve_wire_pb2 as pb
from gradserve.wire.results import ForwardBackwardResult
from tests.contract.gateway.gate import Gate, batch, opened, problem, row


def result() -> bytes:
    logprobs = [Array.of(np.full(3, -1, np.float32))]
    return codec.encode_forward_backward(ForwardBackwardResult(logprobs, {"loss:sum": 3.0}))


def test_1_training_results_are_protobuf_and_the_rest_is_json(gate: Gate) -> None:
    run = gate.run()
    request_id = gate.forward_backward(batch(run, 1)).json()["request_id"]
    waiting = gate.retrieve(request_id)
    assert waiting.headers["content-type"].startswith("application/json")
    gate.settle(request_id, result(), codec.PROTOBUF)
    answer = gate.retrieve(request_id)
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert answer.content == result()


def test_2_forward_is_not_backward(gate: Gate) -> None:
    run = gate.run()
    for seq, forward_only in ((1, True), (2, False)):
        request_id = gate.forward_backward(batch(run, seq, forward_only=forward_only)).json()["request_id"]
        body = decode_body(gate.op(request_id).body)
        assert isinstance(body, ForwardBackward)
        assert body.backward is not forward_only


def test_3_samples_have_ids_from_the_start(gate: Gate) -> None:
    sampler = gate.sampler()
    first = gate.sample(sampler, 0, num_samples=3).json()["sample_sequence_ids"]
    second = gate.sample(sampler, 1, num_samples=1).json()["sample_sequence_ids"]
    assert (len(first), len(second)) == (3, 1)
    assert len({*first, *second}) == 4


def test_4_client_config(gate: Gate) -> None:
    config = gate.post("client/config", sdk_version="0.38.0").json()
    assert config["parallel_fwdbwd_chunks"] is False, "a refused chunk would block the client for ever"
    assert config["proto_compress_fwdbwd"] is True
    assert config["sample_join_sampling_session"] is True
    assert config["pjwt_auth_enabled"] is False
    assert config["fwdbwd_max_chunk_bytes_count"] == 32_000_000
    assert gate.post("client/dynamic_config", sdk_version="0.38.0").json()["sample_cancel_enabled"] is True


def test_4_chunks_fit_a_small_body_limit(tmp_path: Path) -> None:
    with opened(tmp_path, max_body_bytes=1 << 20) as small:
        assert small.post("client/config").json()["fwdbwd_max_chunk_bytes_count"] == 1 << 19


def test_5_and_6_metrics_say_their_reduction_and_every_row_has_an_output() -> None:
    message = pb.ForwardBackwardOutput.FromString(result())
    assert [key.count(":") for key in message.metrics] == [1]
    assert sum(record.num_datums for record in message.loss_fn_outputs) == 1


def test_7_a_future_is_held_until_it_ends(tmp_path: Path) -> None:
    with opened(tmp_path, long_poll_s=20) as gate:
        run = gate.run()
        request_id = gate.forward_backward(batch(run, 1)).json()["request_id"]

        def later() -> None:
            time.sleep(0.3)
            gate.settle(request_id, result(), codec.PROTOBUF)

        scheduler = threading.Thread(target=later)
        begun = time.monotonic()
        scheduler.start()
        answer = gate.retrieve(request_id)
        scheduler.join()
        assert answer.status_code == 200
        assert 0.25 < time.monotonic() - begun < 10


def test_7_a_long_one_is_asked_for_again_without_noise(gate: Gate) -> None:
    run = gate.run()
    request_id = gate.forward_backward(batch(run, 1)).json()["request_id"]
    answer = gate.retrieve(request_id)
    assert answer.status_code == 408
    assert answer.json() == {"type": "try_again", "request_id": request_id, "queue_state": "active"}


def test_8_a_refused_seq_is_consumed(gate: Gate) -> None:
    run = gate.run()
    refused = gate.forward_backward(batch(run, 1, row([999])))
    assert refused.status_code == 400
    assert gate.cursor(run) == 1
    again = gate.forward_backward(batch(run, 1))
    assert problem(again)["code"] == problem(refused)["code"], "the refusal is final, whatever comes under its seq"
    assert gate.forward_backward(batch(run, 2)).status_code == 200


def test_9_chunk_1_may_come_last(gate: Gate) -> None:
    run = gate.run()
    for seq in (2, 3, 1):
        assert gate.forward_backward(batch(run, seq)).status_code == 200
    assert gate.cursor(run) == 0, "nothing has run yet"


def test_10_any_tml_key_will_do_on_loopback(gate: Gate) -> None:
    for key, status in (("tml-x", 200), ("sk-x", 401), ("", 401), (None, 401)):
        gate.key = key
        try:
            answer = gate.get("get_server_capabilities")
        finally:
            gate.key = "tml-anything"
        assert answer.status_code == status
        if status == 401:
            problem(answer)


def test_stand_in_loss_is_announced_once_per_run(gate: Gate) -> None:
    ones = np.ones(3, np.float32)
    datum = row([1, 2, 3], logprobs=-ones, advantages=ones)
    run, other = gate.run(), gate.run()
    notes = [
        gate.forward_backward(batch(name, seq, datum, loss="stable_reinforce")).headers.get("x-deprecation-note")
        for name, seq in ((run, 1), (run, 2), (other, 1))
    ]
    assert notes[0] is not None
    assert "stand-in" in notes[0]
    assert notes[1:] == [None, notes[0]]
    assert "x-deprecation-note" not in gate.forward_backward(batch(run, 3)).headers
