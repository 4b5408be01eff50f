"""Tenants with keys of their own can't see each other; published checkpoints are the one exception."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.gateway.gate import Gate, batch, opened, problem

ALICE, BOB = "tml-alice-0123456789abcdef", "tml-bob-0123456789abcdef"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with opened(tmp_path_factory.mktemp("tenants"), api_keys=(ALICE, BOB)) as gate:
        yield gate


def test_keys(gate: Gate) -> None:
    for key, code in ((None, "auth.missing"), ("tml-x", "auth.unknown_key"), (ALICE + "x", "auth.unknown_key")):
        gate.key = key
        answer = gate.get("training_runs")
        assert (answer.status_code, problem(answer)["code"]) == (401, code)
        assert "invalid_token" not in answer.headers["www-authenticate"], "that would make the SDK exchange tokens"


def test_the_other_tenant_sees_nothing(gate: Gate) -> None:
    gate.key = ALICE
    session = gate.session()
    run, sampler = gate.run(session), gate.sampler(session)
    path = gate.save(run, 1, "a").path
    request_id = gate.forward_backward(batch(run, 2)).json()["request_id"]
    urls = gate.get(f"training_runs/{run}/checkpoints/weights/a/external_weights_urls").json()["urls"]

    gate.key = BOB
    mine = gate.session()
    one = f"training_runs/{run}/checkpoints/weights/a"
    for answer in (
        gate.get(f"training_runs/{run}"),
        gate.get(f"training_runs/{run}/checkpoints"),
        gate.get(f"{one}/external_weights_urls"),
        gate.call("DELETE", one),
        gate.call("POST", f"{one}/publish"),
        gate.call("PUT", f"{one}/ttl", json={"ttl_seconds": 3600}),
        gate.get(f"sessions/{session}"),
        gate.get(f"samplers/{sampler}"),
        gate.get(f"gradserve/runs/{run}"),
        gate.get(f"gradserve/runs/{run}/ledger"),
        gate.post("session_heartbeat", session_id=session),
        gate.post(f"sessions/{session}/finish", reason={"type": "success"}),
        gate.post("get_info", model_id=run),
        gate.post("weights_info", tinker_path=path),
        gate.post("join_sampling_session", sampling_session_id=sampler),
        gate.post("create_sampling_session", session_id=mine, sampling_session_seq_id=0, model_path=path),
        gate.post("load_weights", session_id=mine, model_seq_id=0, path=path, optimizer=False),
        gate.post("optim_step", model_id=run, seq_id=3, adam_params={}),
        gate.create_model(session, 5),
        gate.forward_backward(batch(run, 3)),
        gate.sample(sampler),
        gate.retrieve(request_id),
    ):
        assert answer.status_code == 404, answer.text
        problem(answer)
    assert gate.cursor(run) == 1, "a stranger's refused request consumes nothing"
    for listing, field in (("training_runs", "training_runs"), ("checkpoints", "checkpoints")):
        assert gate.get(listing).json()[field] == []
    assert session not in gate.get("sessions").json()["sessions"]
    assert gate.get("gradserve/runs").json()["runs"] == []
    assert gate.client.get(urls["adapter_config.json"]).status_code == 200, "whoever holds a link may read"

    gate.key = ALICE
    gate.sample(sampler)
    gate.key = BOB
    assert gate.sample(sampler).status_code == 404, "not through the cache either"


def test_published_checkpoints_can_be_loaded_by_all(gate: Gate) -> None:
    gate.key = ALICE
    run = gate.run()
    path = gate.save(run, 1, "public").path
    gate.call("POST", f"training_runs/{run}/checkpoints/weights/public/publish")
    gate.key = BOB
    session = gate.session()
    assert gate.post("weights_info", tinker_path=path).status_code == 200
    assert gate.sampler(session, model_path=path)
    answer = gate.post("load_weights", session_id=session, model_seq_id=0, path=path, optimizer=False)
    assert answer.json()["model_id"] == f"{session}:train:0"
    assert gate.call("DELETE", f"training_runs/{run}/checkpoints/weights/public").status_code == 404


def test_without_keys_only_loopback_is_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    with opened(tmp_path_factory.mktemp("open"), host="0.0.0.0") as gate:
        answer = gate.get("training_runs")
        assert (answer.status_code, problem(answer)["code"]) == (401, "auth.unknown_key")
