"""Every kind of bad JSON request: what exactly is answered, and that a run goes on with the next seq."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from tests.contract.gateway.gate import Gate, batch, problem, prompt


class Bad(NamedTuple):
    path: str
    body: dict[str, Any]
    code: str
    field: str | None
    status: int = 400


def adam(**params: Any) -> dict[str, Any]:
    return {"adam_params": {"learning_rate": 1e-3, **params}}


NEW = {"path": "name", "model_id": "RUN", "seq_id": 1}
TRAINING = {
    "learning rate below 0": Bad("optim_step", adam(learning_rate=-1e-3), "optim.range", "adam_params.learning_rate"),
    "beta1 of 1": Bad("optim_step", adam(beta1=1.0), "optim.range", "adam_params.beta1"),
    "beta2 below 0": Bad("optim_step", adam(beta2=-0.1), "optim.range", "adam_params.beta2"),
    "eps below 0": Bad("optim_step", adam(eps=-1e-9), "optim.range", "adam_params.eps"),
    "weight decay below 0": Bad("optim_step", adam(weight_decay=-0.1), "optim.range", "adam_params.weight_decay"),
    "clip below 0": Bad("optim_step", adam(grad_clip_norm=-1.0), "optim.range", "adam_params.grad_clip_norm"),
    "text learning rate": Bad("optim_step", adam(learning_rate="fast"), "body.type", "adam_params.learning_rate"),
    "null learning rate": Bad("optim_step", adam(learning_rate=None), "body.type", "adam_params.learning_rate"),
    "unknown Adam field": Bad("optim_step", adam(amsgrad=True), "body.unknown_field", "adam_params.amsgrad"),
    "no Adam": Bad("optim_step", {}, "body.missing_field", "adam_params"),
    "dimuon step": Bad(
        "optim_step",
        {"optimizer_params": {"type": "dimuon", "learning_rate": 1e-3}},
        "unsupported.optimizer",
        "optimizer_params",
    ),
    "name with a slash": Bad("save_weights", {"path": "a/b"}, "checkpoint.name", "path"),
    "name with two dots first": Bad("save_weights", {"path": ".."}, "checkpoint.name", "path"),
    "empty name": Bad("save_weights", {"path": ""}, "checkpoint.name", "path"),
    "long name": Bad("save_weights", {"path": "n" * 129}, "checkpoint.name", "path"),
    "no name": Bad("save_weights", {}, "checkpoint.name", "path"),
    "name that is a number": Bad("save_weights", {"path": 3}, "body.type", "path"),
    "ttl below an hour": Bad("save_weights", {"path": "a", "ttl_seconds": 3599}, "checkpoint.ttl", "ttl_seconds"),
    "ttl above ten years": Bad(
        "save_weights_for_sampler", {"path": "a", "ttl_seconds": 10**9}, "checkpoint.ttl", "ttl_seconds"
    ),
    "sampler save without target": Bad("save_weights_for_sampler", {}, "save.target", "path"),
    "sampler save with both targets": Bad(
        "save_weights_for_sampler", {"path": "a", "sampling_session_seq_id": 0}, "save.target", "path"
    ),
    "unnamed save below 0": Bad(
        "save_weights_for_sampler", {"sampling_session_seq_id": -1}, "seq.range", "sampling_session_seq_id"
    ),
    "unnamed save with ttl": Bad(
        "save_weights_for_sampler",
        {"sampling_session_seq_id": 0, "ttl_seconds": 7200},
        "checkpoint.ttl",
        "ttl_seconds",
    ),
    "inflight": Bad(
        "save_weights_for_sampler", {"sampling_session_seq_id": 0, "kind": "inflight"}, "unsupported.inflight", "kind"
    ),
    "unknown kind": Bad("save_weights_for_sampler", {"path": "a", "kind": "warm"}, "body.type", "kind"),
    "age": Bad(
        "save_weights_external",
        {"path": "a", "age_encryption_recipients": ["age1xyz"]},
        "weights.recipient",
        "age_encryption_recipients",
    ),
    "load of a bad path": Bad(
        "load_weights", {"path": "tinker://x/weights", "optimizer": False}, "checkpoint.path", "path"
    ),
    "load of a bad kind": Bad(
        "load_weights", {"path": "tinker://x/y/z", "optimizer": False}, "checkpoint.path", "path"
    ),
    "load of nothing": Bad(
        "load_weights", {"path": "tinker://x/weights/z", "optimizer": False}, "checkpoint.unknown", "path", 404
    ),
    "load with a token": Bad(
        "load_weights",
        {"path": "tinker://x/weights/z", "optimizer": False, "weights_access_token": "t"},
        "unsupported.access_token",
        "weights_access_token",
    ),
    "unknown field of a save": Bad("save_weights", {"path": "a", "expire": 1}, "body.unknown_field", "expire"),
}


@pytest.mark.parametrize("name", TRAINING)
def test_refused_and_the_run_goes_on(gate: Gate, name: str) -> None:
    bad, run = TRAINING[name], gate.run()
    gate.submitted()

    answer = gate.post(bad.path, model_id=run, seq_id=1, type=bad.path, **bad.body)

    assert answer.status_code == bad.status
    document = problem(answer)
    assert (document["code"], document.get("field")) == (bad.code, bad.field)
    assert gate.cursor(run) == 1, "the refused seq is consumed"
    assert [op.state for op in gate.submitted()] == ["rejected"], "the scheduler hears of it"
    assert gate.forward_backward(batch(run, 2)).status_code == 200


def params(**given: Any) -> dict[str, Any]:
    return {"sampling_params": {"max_tokens": 4, **given}}


def targets(**tensor: Any) -> dict[str, Any]:
    return {"target_prompt_logprobs": {"dtype": "int64", **tensor}}


SAMPLING = {
    "no prompt": ({"prompt": prompt()}, "prompt.empty", "prompt"),
    "no chunks": ({"prompt": {"chunks": []}}, "prompt.empty", "prompt"),
    "token above vocabulary": ({"prompt": prompt(1, 320)}, "data.vocabulary", "prompt"),
    "negative token": ({"prompt": prompt(-1)}, "data.vocabulary", "prompt"),
    "token beyond int64": ({"prompt": prompt(2**70)}, "data.vocabulary", "prompt"),
    "token that is text": ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": ["a"]}]}}, "body.type", None),
    "image": ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "unsupported.chunk", None),
    "max_tokens of 0": (params(max_tokens=0), "sample.range", "sampling_params.max_tokens"),
    "beyond the context": (params(max_tokens=510), "sample.context", "sampling_params.max_tokens"),
    "prompt fills the context": (
        {"prompt": prompt(*[1] * 512), "sampling_params": {}},
        "sample.context",
        "sampling_params.max_tokens",
    ),
    "negative temperature": (params(temperature=-0.1), "sample.range", "sampling_params.temperature"),
    "text temperature": (params(temperature="hot"), "body.type", "sampling_params.temperature"),
    "top_k of 0": (params(top_k=0), "sample.range", "sampling_params.top_k"),
    "top_k below -1": (params(top_k=-2), "sample.range", "sampling_params.top_k"),
    "top_p of 0": (params(top_p=0), "sample.range", "sampling_params.top_p"),
    "top_p above 1": (params(top_p=1.01), "sample.range", "sampling_params.top_p"),
    "negative seed": (params(seed=-1), "seed.range", "sampling_params.seed"),
    "unknown parameter": (params(min_p=0.1), "body.unknown_field", "sampling_params.min_p"),
    "empty stop string": (params(stop=["a", ""]), "sample.stop", "sampling_params.stop"),
    "mixed stops": (params(stop=["a", 3]), "sample.stop", "sampling_params.stop"),
    "stop token above vocabulary": (params(stop=[320]), "sample.stop", "sampling_params.stop"),
    "many stops": (params(stop=[3] * 65), "sample.stop", "sampling_params.stop"),
    "no samples": ({"num_samples": 0}, "sample.range", "num_samples"),
    "many samples": ({"num_samples": 1025}, "sample.range", "num_samples"),
    "wide topk": ({"topk_prompt_logprobs": 129}, "sample.range", "topk_prompt_logprobs"),
    "negative topk": ({"topk_sample_logprobs": -1}, "sample.range", "topk_sample_logprobs"),
    "alternative tokens": ({"prompt_alt_tokens_k": 2}, "unsupported.prompt_alt_tokens", "prompt_alt_tokens_k"),
    "last n": (
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 1},
        "unsupported.prompt_logprobs_last_n",
        "prompt_logprobs_last_n",
    ),
    "model beside the session": ({"base_model": "tiny"}, "unsupported.sample_without_session", "sampling_session_id"),
    "targets of wrong length": (targets(data=[1], shape=[1, 1]), "sample.targets", "target_prompt_logprobs.shape"),
    "targets without shape": (targets(data=[1, 1]), "sample.targets", "target_prompt_logprobs.shape"),
    "targets short of data": (targets(data=[1], shape=[2, 1]), "sample.targets", "target_prompt_logprobs"),
    "targets all empty": (targets(data=[-1, -1], shape=[2, 1]), "sample.targets", "target_prompt_logprobs"),
    "targets above vocabulary": (targets(data=[1, 320], shape=[2, 1]), "sample.targets", "target_prompt_logprobs"),
    "float targets": (
        targets(data=[1, 2], shape=[2, 1]) | {"target_prompt_logprobs": {"data": [1], "dtype": "float32"}},
        "sample.targets",
        "target_prompt_logprobs.dtype",
    ),
    "sparse targets out of place": (
        targets(data=[5], shape=[2, 1], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[4]),
        "sample.targets",
        "target_prompt_logprobs",
    ),
    "new field": ({"guided_grammar": "x"}, "body.unknown_field", "guided_grammar"),
    "negative seq": ({"seq_id": -1}, "seq.range", "seq_id"),
    "no session": ({"sampling_session_id": None}, "unsupported.sample_without_session", "sampling_session_id"),
    "null seq": ({"seq_id": None}, "body.type", "seq_id"),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_refused_sample(gate: Gate, name: str) -> None:
    fields, code, field = SAMPLING[name]
    sampler = gate.sampler()
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": prompt(1, 2, 3),
        "sampling_params": {"max_tokens": 4},
    }
    answer = gate.post("asample", **{**body, **fields})
    assert answer.status_code == 400
    document = problem(answer)
    assert document["code"] == code
    if field is not None:
        assert document["field"] == field
    assert gate.sample(sampler, 0).status_code == 200, "nothing was written"


def test_context_error_shows_the_arithmetic(gate: Gate) -> None:
    answer = gate.sample(gate.sampler(), sampling_params={"max_tokens": 510})
    assert "3 + 510 > 512" in problem(answer)["detail"]


MODELS: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "unknown base": ({"base_model": "gpt"}, 404, "model.unknown", "base_model"),
    "no base": ({"base_model": ""}, 404, "model.unknown", "base_model"),
    "rank 0": ({"lora_config": {"rank": 0}}, 400, "lora.rank", "lora_config.rank"),
    "rank above the limit": ({"lora_config": {"rank": 257}}, 400, "lora.rank", "lora_config.rank"),
    "text rank": ({"lora_config": {"rank": "8"}}, 400, "body.type", "lora_config.rank"),
    "no rank": ({"lora_config": {}}, 400, "body.missing_field", "lora_config.rank"),
    "negative seed": ({"lora_config": {"rank": 4, "seed": -1}}, 400, "seed.range", "lora_config.seed"),
    "nothing to train": (
        {"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}},
        400,
        "lora.nothing_to_train",
        "lora_config",
    ),
    "unknown adapter field": (
        {"lora_config": {"rank": 4, "alpha": 16}},
        400,
        "body.unknown_field",
        "lora_config.alpha",
    ),
    "no adapters": ({"lora_config": None}, 400, "unsupported.full_finetuning", "lora_config"),
    "an extension without adapters": (
        {"lora_config": None, "gradserve": {}},
        400,
        "unsupported.full_finetuning",
        "lora_config",
    ),
    "unknown extension": ({"gradserve": {"params": "full"}}, 400, "body.unknown_field", "gradserve.params"),
    "unknown parameters": ({"gradserve": {"parameters": "some"}}, 400, "body.type", "gradserve.parameters"),
    "an extension that is no object": ({"gradserve": "full"}, 400, "body.type", "gradserve"),
    "adapters and all parameters": ({"gradserve": {"parameters": "full"}}, 400, "full.lora_config", "lora_config"),
    "dimuon": ({"optimizer_config": {"type": "dimuon"}}, 400, "unsupported.optimizer", "optimizer_config"),
    "negative number": ({"model_seq_id": -1}, 400, "seq.range", "model_seq_id"),
    "unknown session": ({"session_id": "nowhere"}, 404, "session.unknown", "session_id"),
}


@pytest.mark.parametrize("name", MODELS)
def test_refused_model(gate: Gate, name: str) -> None:
    fields, status, code, field = MODELS[name]
    body = {"session_id": gate.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    answer = gate.post("create_model", **{**body, **fields})
    assert answer.status_code == status
    document = problem(answer)
    assert (document["code"], document["field"]) == (code, field)


def test_unknown_base_lists_those_offered(gate: Gate) -> None:
    detail = problem(gate.create_model(gate.session(), base="gpt"))["detail"]
    assert "tiny" in detail
    assert "other" in detail


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({}, 400, "sampler.target"),
        ({"base_model": "gpt"}, 404, "model.unknown"),
        ({"model_path": "/tmp/x"}, 400, "checkpoint.path"),
        ({"model_path": "tinker://a/weights/b"}, 404, "checkpoint.unknown"),
        ({"base_model": "tiny", "sampling_session_seq_id": -1}, 400, "seq.range"),
        ({"base_model": "tiny", "session_id": "nowhere"}, 404, "session.unknown"),
    ],
)
def test_refused_sampling_session(gate: Gate, fields: dict[str, Any], status: int, code: str) -> None:
    body = {"session_id": gate.session(), "sampling_session_seq_id": 0}
    answer = gate.post("create_sampling_session", **{**body, **fields})
    assert (answer.status_code, problem(answer)["code"]) == (status, code)


def test_load_needs_one_target(gate: Gate) -> None:
    run = gate.run()
    path = gate.save(run, 1, "a").path
    answer = gate.post("load_weights", path=path, model_id=run, seq_id=2)
    assert (problem(answer)["code"], problem(answer)["field"]) == ("body.missing_field", "optimizer")
    for target in ({}, {"model_id": run}, {"model_id": run, "seq_id": 2, "session_id": "s", "model_seq_id": 1}):
        answer = gate.post("load_weights", path=path, optimizer=False, **target)
        assert (answer.status_code, problem(answer)["code"]) == (400, "load.target")


def test_load_must_fit(gate: Gate) -> None:
    session = gate.session()
    small = gate.run(session, 0)
    checkpoint = gate.save(small, 1, "a")
    sampler_only = gate.save(small, 2, "b", "sampler_weights")
    big = gate.create_model(session, 1, lora_config={"rank": 8}).json()["model_id"]
    answer = gate.post("load_weights", model_id=big, seq_id=1, path=checkpoint.path, optimizer=False)
    assert (answer.status_code, problem(answer)["code"]) == (400, "load.mismatch")
    answer = gate.post("load_weights", model_id=small, seq_id=3, path=sampler_only.path, optimizer=True)
    assert (answer.status_code, problem(answer)["code"]) == (400, "load.optimizer")
    answer = gate.post(
        "load_weights", session_id=session, model_seq_id=2, path=checkpoint.path, optimizer=False, base_model="other"
    )
    assert (answer.status_code, problem(answer)["code"]) == (400, "load.mismatch")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"model_id": NaN}', b"null"])
def test_not_json(gate: Gate, content: bytes) -> None:
    answer = gate.call("POST", "optim_step", content=content)
    assert answer.status_code == 400
    assert problem(answer)["code"] in ("body.malformed", "body.type")


def test_number_too_large_for_a_double(gate: Gate) -> None:
    run = gate.run()
    body = {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": 0}}
    content = json.dumps(body).replace(": 0}", ": 1e999}")
    answer = gate.call("POST", "optim_step", content=content)
    assert answer.status_code == 400
    problem(answer)


def test_training_seq_starts_at_1(gate: Gate) -> None:
    run = gate.run()
    for seq in (0, -1):
        answer = gate.forward_backward(batch(run, seq))
        assert (answer.status_code, problem(answer)["code"]) == (400, "seq.range")
        answer = gate.post("optim_step", model_id=run, seq_id=seq, **adam())
        assert (answer.status_code, problem(answer)["code"]) == (400, "seq.range")
    assert gate.cursor(run) == 0


@pytest.mark.parametrize("missing", ["session_id", "model_seq_id", "base_model"])
def test_required_fields(gate: Gate, missing: str) -> None:
    body = {"session_id": gate.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    del body[missing]
    document = problem(gate.post("create_model", **body))
    assert (document["status"], document["code"], document["field"]) == (400, "body.missing_field", missing)


def test_unknown_run(gate: Gate) -> None:
    for answer in (
        gate.forward_backward(batch("nowhere", 1)),
        gate.post("optim_step", model_id="nowhere", seq_id=1, **adam()),
        gate.post("get_info", model_id="nowhere"),
        gate.post("save_weights", model_id="nowhere", seq_id=1, path="a"),
    ):
        assert (answer.status_code, problem(answer)["code"]) == (404, "run.unknown")
