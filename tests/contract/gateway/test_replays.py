"""A retry is the same request: same id, one Op, one wake-up. Another request under the same number is refused."""

from __future__ import annotations

from typing import Any

from gradserve.wire.ops import CreateModel, LoadWeights, Sample, SaveForSampling, decode_body
from tests.contract.gateway.gate import Gate, batch, problem, prompt, row


def test_training(gate: Gate) -> None:
    run = gate.run()
    gate.submitted()
    first = gate.forward_backward(batch(run, 1))
    again = gate.forward_backward(batch(run, 1))
    assert first.json() == again.json() == {"request_id": f"{run}:op:1", "model_id": run}
    assert len(gate.submitted()) == 1
    gate.settle(f"{run}:op:1", b"{}")
    assert gate.forward_backward(batch(run, 1)).json() == first.json(), "after its end too"
    other = gate.forward_backward(batch(run, 1, row([4])))
    assert (other.status_code, problem(other)["code"]) == (400, "op.conflict")
    assert gate.op(f"{run}:op:1").state == "done", "the conflict changed nothing"


def test_bad_request_under_a_used_seq_changes_nothing(gate: Gate) -> None:
    run = gate.run()
    assert gate.forward_backward(batch(run, 1)).status_code == 200
    assert gate.forward_backward(batch(run, 1, row([999]))).status_code == 400
    assert gate.op(f"{run}:op:1").state == "accepted"


def test_create_model_draws_the_same_seed(gate: Gate) -> None:
    session = gate.session()
    first = gate.create_model(session)
    again = gate.create_model(session)
    assert first.json() == again.json()
    assert first.json()["model_id"] == f"{session}:train:0"
    body = decode_body(gate.op(first.json()["request_id"]).body)
    assert isinstance(body, CreateModel)
    assert body.lora is not None
    assert 0 <= body.lora.seed < 2**63
    other = gate.create_model(session, lora_config={"rank": 8})
    assert (other.status_code, problem(other)["code"]) == (400, "op.conflict")
    second = gate.create_model(session, 1)
    other_body = decode_body(gate.op(second.json()["request_id"]).body)
    assert isinstance(other_body, CreateModel)
    assert other_body.lora is not None
    assert other_body.lora.seed != body.lora.seed


def test_sample_draws_the_same_seed(gate: Gate) -> None:
    sampler = gate.sampler()
    first, again = gate.sample(sampler, 5, num_samples=2), gate.sample(sampler, 5, num_samples=2)
    assert first.json() == again.json()
    other = gate.sample(sampler, 5, prompt=prompt(9))
    assert (other.status_code, problem(other)["code"]) == (400, "op.conflict")
    seeds = {sample_of(gate, gate.sample(sampler, seq)).params.seed for seq in (6, 7, 10**18)}
    assert len(seeds) == 3


def sample_of(gate: Gate, answer: Any) -> Sample:
    body = decode_body(gate.op(answer.json()["request_id"]).body)
    assert isinstance(body, Sample)
    return body


def test_sampling_session(gate: Gate) -> None:
    session = gate.session()
    assert gate.sampler(session) == gate.sampler(session) == f"{session}:sample:0"
    other = gate.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="other")
    assert (other.status_code, problem(other)["code"]) == (400, "op.conflict")


def test_save_is_not_stopped_by_its_own_checkpoint(gate: Gate) -> None:
    run = gate.run()
    for seq, (kind, path) in enumerate(
        (
            ("weights", "save_weights"),
            ("sampler_weights", "save_weights_for_sampler"),
            ("external_weights", "save_weights_external"),
        ),
        1,
    ):
        gate.save(run, seq, "a", kind)
        again = gate.post(path, model_id=run, path="a", seq_id=seq)
        assert again.json()["request_id"] == f"{run}:op:{seq}"
    other = gate.post("save_weights", model_id=run, path="a", seq_id=4)
    assert (other.status_code, problem(other)["code"]) == (400, "checkpoint.exists")
    assert gate.post("save_weights", model_id=run, path="a", seq_id=5, overwrite=True).status_code == 200


def test_unnamed_save(gate: Gate) -> None:
    run = gate.run()
    answers = [
        gate.post("save_weights_for_sampler", model_id=run, seq_id=1, sampling_session_seq_id=3, kind="snapshot")
        for _ in range(2)
    ]
    assert answers[0].json() == answers[1].json()
    body = decode_body(gate.op(answers[0].json()["request_id"]).body)
    assert body == SaveForSampling(f"{run.split(':')[0]}:sample:3")


def test_load_outlives_its_checkpoint(gate: Gate) -> None:
    session = gate.session()
    run = gate.run(session)
    path = gate.save(run, 1, "a").path
    into = {"model_id": run, "seq_id": 2, "path": path, "optimizer": True}
    new = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
    before = [gate.post("load_weights", **body).json() for body in (into, new)]
    assert before[1]["model_id"] == f"{session}:train:1", "the client derives this id by itself"
    assert gate.post("get_info", model_id=f"{session}:train:1").json()["lora_rank"] == 4
    assert gate.call("DELETE", f"training_runs/{run}/checkpoints/weights/a").status_code == 204
    assert [gate.post("load_weights", **body).json() for body in (into, new)] == before
    assert decode_body(gate.op(f"{session}:train:1:op:0").body) == LoadWeights(path, False, creates=True)
    assert gate.post("load_weights", **{**into, "seq_id": 3}).status_code == 404


def test_join_gives_everyone_another_number(gate: Gate) -> None:
    sampler = gate.sampler()
    numbers = [gate.post("join_sampling_session", sampling_session_id=sampler).json()["client_counter"] for _ in "123"]
    assert len(set(numbers)) == 3
    assert min(numbers) >= 1
    answer = gate.post("join_sampling_session", sampling_session_id="nowhere")
    assert (answer.status_code, problem(answer)["code"]) == (404, "sampler.unknown")


def test_an_unnamed_save_that_is_sent_again_may_carry_another_number(gate: Gate) -> None:
    """As the public SDK does after a lost connection; the session is the one that the first attempt opened."""
    run = gate.run()
    first = gate.post("save_weights_for_sampler", model_id=run, seq_id=1, sampling_session_seq_id=0)
    again = gate.post("save_weights_for_sampler", model_id=run, seq_id=1, sampling_session_seq_id=1)
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.json() == first.json()
    assert [op.id for op in gate.submitted() if op.scope == run and op.seq == 1] == [f"{run}:op:1"], "one Op"
    body = decode_body(gate.op(f"{run}:op:1").body)
    assert isinstance(body, SaveForSampling)
    assert body.sampling_session_id.endswith(":sample:0")
    other = gate.post("optim_step", model_id=run, seq_id=1, adam_params={"learning_rate": 1e-3})
    assert (other.status_code, problem(other)["code"]) == (400, "op.conflict")
