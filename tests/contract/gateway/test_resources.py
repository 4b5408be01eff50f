"""Runs, checkpoints, files, sessions and the ledger, as the SDK's REST client reads them."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from tinker import types

from gradserve.compute.checkpoints import folder_of
from gradserve.compute.objects import ObjectStore
from gradserve.gateway.signing import Link, Signer
from gradserve.store.overview import RunDetail, RunList
from gradserve.store.wakeups import MakeWhole
from gradserve.wire.errors import Forbidden, Gone
from tests.contract.gateway.gate import Gate, batch, nobody_mends, problem


def test_runs(gate: Gate) -> None:
    session = gate.session()
    run = gate.create_model(session, user_metadata={"k": "v", "n": 3}).json()["model_id"]
    gate.settle(f"{run}:op:0", b"{}")
    found = types.TrainingRun.model_validate(gate.get(f"training_runs/{run}", access_scope="owned").json())
    assert (found.training_run_id, found.base_model, found.lora_rank) == (run, "tiny", 4)
    assert found.user_metadata == {"k": "v", "n": "3"}
    listed = types.TrainingRunsResponse.model_validate(gate.get("training_runs", limit=2, offset=0).json())
    assert listed.training_runs[0].training_run_id == run, "newest first"
    assert len(listed.training_runs) <= 2
    answer = gate.get("training_runs/nowhere")
    assert (answer.status_code, problem(answer)["code"]) == (404, "run.unknown")


def test_info(gate: Gate) -> None:
    info = types.GetInfoResponse.model_validate(gate.post("get_info", model_id=gate.run()).json())
    assert (info.model_name, info.lora_rank, info.is_lora) == ("tiny", 4, True)
    assert info.model_data.tokenizer_id == "/models/tiny", "a client on this machine reads it where the model is"


def test_checkpoints(gate: Gate) -> None:
    run = gate.run()
    path = gate.save(run, 1, "s1", user_metadata={"step": 1}).path
    gate.save(run, 2, "w1", "sampler_weights")
    answer = types.CheckpointsListResponse.model_validate(gate.get(f"training_runs/{run}/checkpoints").json())
    assert [(c.checkpoint_id, c.checkpoint_type) for c in answer.checkpoints] == [
        ("sampler_weights/w1", "sampler"),
        ("weights/s1", "training"),
    ]
    found = types.TrainingRun.model_validate(gate.get(f"training_runs/{run}").json())
    assert found.last_checkpoint is not None
    assert found.last_checkpoint.tinker_path == path
    assert found.last_sampler_checkpoint is not None
    everything = types.CheckpointsListResponse.model_validate(gate.get("checkpoints", limit=1000, offset=0).json())
    assert everything.cursor is not None
    assert everything.cursor.total_count >= 2
    info = types.WeightsInfoResponse.model_validate(gate.post("weights_info", tinker_path=path).json())
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("tiny", 4, True)


def test_checkpoint_life(gate: Gate) -> None:
    run = gate.run()
    gate.save(run, 1, "a")
    one = f"training_runs/{run}/checkpoints/weights/a"
    assert gate.call("POST", f"{one}/publish").status_code == 204
    assert gate.get(f"training_runs/{run}/checkpoints").json()["checkpoints"][0]["public"] is True
    assert gate.call("DELETE", f"{one}/publish").status_code == 204
    assert gate.call("PUT", f"{one}/ttl", json={"ttl_seconds": 7200}).status_code == 204
    expires = types.Checkpoint.model_validate(
        gate.get(f"training_runs/{run}/checkpoints").json()["checkpoints"][0]
    ).expires_at
    assert expires is not None
    assert 7100 < expires.timestamp() - time.time() < 7300
    assert gate.call("PUT", f"{one}/ttl", json={"ttl_seconds": None}).status_code == 204
    assert gate.get(f"training_runs/{run}/checkpoints").json()["checkpoints"][0]["expires_at"] is None
    for body, code in (({"ttl_seconds": 60}, "checkpoint.ttl"), ({}, "body.missing_field")):
        answer = gate.call("PUT", f"{one}/ttl", json=body)
        assert (answer.status_code, problem(answer)["code"]) == (400, code)
    folder = folder_of(gate.app.state.gateway.folders, run, "weights", "a")
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"a link to the object")
    assert gate.call("DELETE", one).status_code == 204
    assert not folder.exists(), "its bytes go with it"
    for method, suffix in (("DELETE", ""), ("POST", "/publish"), ("DELETE", "/publish")):
        answer = gate.call(method, one + suffix)
        assert (answer.status_code, problem(answer)["code"]) == (404, "checkpoint.unknown")


def test_files(gate: Gate) -> None:
    run = gate.run(lora_config={"rank": 4, "train_mlp": False, "train_unembed": False})
    checkpoint = gate.save(run, 1, "e", "external_weights")
    found = types.ExternalWeightsUrlsResponse.model_validate(
        gate.get(f"training_runs/{run}/checkpoints/external_weights/e/external_weights_urls").json()
    )
    assert set(found.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    assert 3500 < found.expires.timestamp() - time.time() <= 3600
    config = json.loads(gate.client.get(found.urls["adapter_config.json"]).content)
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32, "LORA")
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    weights = gate.client.get(found.urls["adapter_model.safetensors"])
    assert weights.content == gate.objects.path(checkpoint.weights).read_bytes()
    part = gate.client.get(found.urls["adapter_model.safetensors"], headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.content) == (206, weights.content[2:5])
    other = found.urls["adapter_config.json"].replace("adapter_config.json", "optimizer.safetensors")
    assert problem(gate.client.get(other))["code"] == "file.unknown"
    gate.call("DELETE", f"training_runs/{run}/checkpoints/external_weights/e")
    assert problem(gate.client.get(found.urls["adapter_config.json"]))["code"] == "checkpoint.unknown"


def test_damaged_weights_are_not_given_out(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orchestration is asked first, and what it says is told."""
    asked = nobody_mends(gate, monkeypatch)
    run = gate.run()
    checkpoint = gate.save(run, 1, "e", "external_weights")
    urls = gate.get(f"training_runs/{run}/checkpoints/external_weights/e/external_weights_urls").json()["urls"]
    gate.objects.path(checkpoint.weights).write_bytes(b"something else")
    answer = gate.client.get(urls["adapter_model.safetensors"])
    assert (answer.status_code, problem(answer)["code"]) == (500, "checkpoint.corrupt")
    assert asked == [MakeWhole.of(checkpoint, "local", "weights")]


def test_a_damaged_state_of_the_client_is_not_given_out(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = nobody_mends(gate, monkeypatch)
    run = gate.run()
    assert gate.call("PUT", f"gradserve/runs/{run}/client_state", content=b"row 1").status_code == 204
    digest = ObjectStore.digest(b"row 1")
    assert gate.get(f"gradserve/runs/{run}/client_state").content == b"row 1"
    for tier in (gate.objects.fast, gate.objects.durable):
        (tier / f"{digest}.safetensors").write_bytes(b"row 2")
    answer = gate.get(f"gradserve/runs/{run}/client_state")
    assert (answer.status_code, problem(answer)["code"]) == (500, "checkpoint.corrupt")
    assert asked == [MakeWhole("local", run, run, 0, {digest: "client state"})]


def test_forged_links(gate: Gate) -> None:
    for token in ("x", "é", "A" * 100, ""):
        answer = gate.client.get(f"/api/v1/files/{token}/adapter_config.json")
        assert answer.status_code in (403, 404)
        problem(answer)


def test_links_expire_and_belong_to_their_signer() -> None:
    signer = Signer()
    link = Link("t", "r", "weights", "n", 100.0)
    token = signer.sign(link)
    assert signer.read(token, 99.0) == link
    with pytest.raises(Gone):
        signer.read(token, 101.0)
    with pytest.raises(Forbidden):
        Signer().read(token, 99.0)
    with pytest.raises(Forbidden):
        signer.read(token[:-2] + ("AA" if not token.endswith("AA") else "BB"), 99.0)


def test_session_life(gate: Gate) -> None:
    session = gate.session()
    assert gate.post("session_heartbeat", session_id=session).json() == {"type": "session_heartbeat"}
    run, sampler = gate.run(session), gate.sampler(session)
    found = types.GetSessionResponse.model_validate(gate.get(f"sessions/{session}").json())
    assert (found.training_run_ids, found.sampler_ids) == ([run], [sampler])
    assert session in gate.get("sessions", limit=1000).json()["sessions"]
    finish = {"reason": {"type": "success"}, "detail": None}
    assert gate.post(f"sessions/{session}/finish", **finish).status_code == 200
    assert gate.post(f"sessions/{session}/finish", reason={"type": "errored"}, detail="late").status_code == 200
    for answer in (
        gate.post("session_heartbeat", session_id=session),
        gate.forward_backward(batch(run, 1)),
        gate.post("optim_step", model_id=run, seq_id=2, adam_params={}),
        gate.sample(sampler),
        gate.create_model(session, 1),
        gate.post("create_sampling_session", session_id=session, sampling_session_seq_id=1, base_model="tiny"),
    ):
        assert (answer.status_code, problem(answer)["code"]) == (410, "session.finished")
    assert "success" in problem(gate.sample(sampler))["detail"], "the first reason stays"
    answer = gate.post("sessions/nowhere/finish", **finish)
    assert (answer.status_code, problem(answer)["code"]) == (404, "session.unknown")


def test_search(gate: Gate) -> None:
    ids = [
        gate.post("create_session", tags=[], display_name=f"Long Run {i}", user_metadata={"team": "a"}).json()[
            "session_id"
        ]
        for i in range(3)
    ]
    gate.post(f"sessions/{ids[0]}/finish", reason={"type": "errored"}, detail="boom")

    def search(**query: object) -> types.SessionSearchResponse:
        answer = gate.post("sessions/search", **query)
        assert answer.status_code == 200, answer.text
        return types.SessionSearchResponse.model_validate(answer.json())

    assert [s.session_id for s in search(display_name="run long").sessions] == ids[::-1]
    first = search(user_metadata={"team": "a"}, limit=2)
    assert [s.session_id for s in first.sessions] == ids[:0:-1]
    assert first.next_cursor is not None
    rest = search(user_metadata={"team": "a"}, limit=2, cursor=first.next_cursor.model_dump(mode="json"))
    assert [s.session_id for s in rest.sessions] == ids[:1]
    assert rest.next_cursor is None
    ended = search(display_name="long", statuses=[{"type": "client_finished", "reasons": ["errored"]}]).sessions
    assert [s.session_id for s in ended] == ids[:1]
    assert [s.session_id for s in search(session_id=ids[1]).sessions] == ids[1:2]
    assert search(session_id=ids[1], owner={"type": "user", "owner_urns": ["somebody"]}).sessions == []
    assert search(display_name="long", project_ids=["p"]).sessions == []
    assert gate.post("sessions/search", limit=201).status_code == 400


def test_ledger_is_empty_before_anything_ran(gate: Gate) -> None:
    run = gate.run()
    answer = gate.get(f"gradserve/runs/{run}/ledger").json()
    assert answer["lines"] == []
    assert answer["total"]["lines"] == 0
    assert isinstance(answer["total"]["amount_usd"], str), "exact decimals"
    assert gate.get("gradserve/ledger").json()["total"]["lines"] == 0


def test_what_the_command_line_reads(gate: Gate) -> None:
    run = gate.run()
    listed = msgspec.json.decode(gate.get("gradserve/runs", limit=5).content, type=RunList)
    assert listed.runs[0].run.id == run
    one = msgspec.json.decode(gate.get(f"gradserve/runs/{run}", lines=3).content, type=RunDetail)
    assert one.run.id == run
    assert gate.get("gradserve/runs/nowhere").status_code == 404


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "ten"}, {"offset": "-1"}, {"limit": "²"}]
)
def test_pages_are_bounded(gate: Gate, query: dict[str, str]) -> None:
    answer = gate.get("checkpoints", **query)
    assert (answer.status_code, problem(answer)["code"]) == (400, "query.range")


def test_system(gate: Gate) -> None:
    names = [model["model_name"] for model in gate.get("get_server_capabilities").json()["supported_models"]]
    assert names == ["tiny", "other"]
    assert gate.post("telemetry", events=[{"secret": "tml-x"}]).json() == {"status": "accepted"}
    gate.key = None
    try:
        assert gate.get("healthz").json() == {"status": "ok", "workers": []}
    finally:
        gate.key = "tml-anything"
    assert gate.get("auth/apikey/me").json()["details"]["user_details"]["email"] == "local"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "auth/token"),
        ("POST", "retrieve_futures"),
        ("POST", "copy_weights"),
        ("PUT", "sessions/s/project"),
        ("GET", "sessions/s/trace_export"),
        ("GET", "audit"),
        ("GET", "billing/usage/events"),
        ("GET", "billing/usage/checkpoints/current"),
    ],
)
def test_unserved_endpoints_say_so_at_once(gate: Gate, method: str, path: str) -> None:
    answer = gate.call(method, path)
    assert (answer.status_code, problem(answer)["code"]) == (501, "unsupported.endpoint")


def test_the_sdk_would_repeat_a_501_for_five_minutes(gate: Gate) -> None:
    answer = gate.call("GET", "audit", headers={"x-stainless-retry-count": "0"})
    assert (answer.status_code, problem(answer)["code"]) == (400, "unsupported.endpoint")


def test_unknown_path_and_method(gate: Gate) -> None:
    answer = gate.get("nope")
    assert (answer.status_code, problem(answer)["code"]) == (404, "http.path")
    answer = gate.get("asample")
    assert (answer.status_code, problem(answer)["code"]) == (405, "http.method")


def test_a_fault_of_ours_shows_no_traceback(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(gate.store, "get_session", broken)
    answer = gate.get("sessions/s")
    assert answer.status_code == 500
    assert problem(answer)["code"] == "server.fault"
    assert "secret" not in answer.text
