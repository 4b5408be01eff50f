"""Runs that train all parameters, as the gateway asks for, refuses and shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tinker import types

from gradserve.compute.catalog import BaseFacts, read_facts
from gradserve.compute.objects import ObjectStore
from gradserve.gateway.validate.full import full_parameters_fit
from gradserve.wire.errors import Invalid
from gradserve.wire.ops import CreateModel, decode_body
from tests.contract.gateway import gate as gates
from tests.contract.gateway.gate import Gate, opened, problem
from tests.models import build_tiny

FULL: dict[str, Any] = {"lora_config": None, "gradserve": {"parameters": "full"}}
GIB = 2**30


def test_all_parameters_are_asked_for_by_one_field(gate: Gate) -> None:
    run = gate.run(**FULL)
    assert decode_body(gate.op(f"{run}:op:0").body) == CreateModel("tiny", None)
    info = types.GetInfoResponse.model_validate(gate.post("get_info", model_id=run).json())
    assert (info.is_lora, info.lora_rank) == (False, None)
    found = types.TrainingRun.model_validate(gate.get(f"training_runs/{run}").json())
    assert (found.is_lora, found.lora_rank) == (False, None)


def test_adapters_may_be_asked_for_by_the_field_too(gate: Gate) -> None:
    run = gate.run(gradserve={"parameters": "lora"})
    body = decode_body(gate.op(f"{run}:op:0").body)
    assert isinstance(body, CreateModel)
    assert body.lora is not None


def test_a_refusal_says_what_to_send_instead(gate: Gate) -> None:
    missing = problem(gate.create_model(gate.session(), lora_config=None))
    assert '{"parameters": "full"}' in missing["fix"]
    unknown = problem(gate.create_model(gate.session(), gradserve={"rank": 3}))
    assert (unknown["field"], "name" in unknown["fix"]) == ("gradserve.rank", True)


def test_a_replay_is_the_same_run_even_when_memory_is_short_by_then(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = gate.session()
    first = gate.create_model(session, **FULL)
    monkeypatch.setattr(ObjectStore, "free_fast_bytes", lambda _: 0)
    assert gate.create_model(session, **FULL).json() == first.json()


@pytest.mark.parametrize(
    ("memory", "objects", "said"),
    [(31, 100, "32.00 GiB of memory"), (100, 27, "28.00 GiB in the object store"), (32, 28, None)],
)
def test_what_cannot_fit_is_refused_with_the_numbers(memory: int, objects: int, said: str | None) -> None:
    """A gibi of float32 parameters is 4 GiB; seven such arrays are objects at an optimizer step, one more is a sum."""
    facts = BaseFacts("big", "/models/big", "llama", 10, 10, (), parameters=GIB)
    if said is None:
        full_parameters_fit(facts, memory * GIB, objects * GIB)
        return
    with pytest.raises(Invalid, match=said) as refused:
        full_parameters_fit(facts, memory * GIB, objects * GIB)
    assert (refused.value.code, refused.value.field) == ("full.memory", "gradserve.parameters")
    assert f"{min(memory, objects)}.00 GiB are free" in refused.value.detail


def test_the_machine_is_looked_at_when_the_run_is_made(tmp_path: Path) -> None:
    parameters = psutil.virtual_memory().total  # eight float32 arrays of so many numbers fit into no machine
    big = msgspec.structs.replace(gates.TINY, parameters=parameters)
    with opened(tmp_path, (big, gates.OTHER)) as gate:
        session = gate.session()
        assert problem(gate.create_model(session, **FULL))["code"] == "full.memory"
        assert gate.create_model(session).status_code == 200, "adapters of the same base are small"


def test_parameters_are_counted_from_the_files_headers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for tie in (True, False):
        folder = build_tiny(tmp_path / str(tie), tie=tie)
        model = AutoModelForCausalLM.from_pretrained(folder)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert read_facts("m", folder).parameters == count
        model.save_pretrained(folder, max_shard_size="100KB")
        (folder / "model.safetensors").unlink()
        assert len(list(folder.glob("model-*.safetensors"))) > 1
        assert read_facts("m", folder).parameters == count
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert read_facts("m", folder).parameters is None


def test_weights_of_the_other_kind_are_refused_and_the_run_goes_on(gate: Gate) -> None:
    full, lora = gate.run(**FULL), gate.run()
    paths = {run: gate.save(run, 1, "s").path for run in (full, lora)}
    for into, path in ((full, paths[lora]), (lora, paths[full])):
        answer = gate.post("load_weights", path=path, optimizer=False, model_id=into, seq_id=2)
        refused = problem(answer)
        assert (refused["code"], refused["field"]) == ("load.mismatch", "path")
        assert "all parameters" in refused["detail"]
        assert "rank 4" in refused["detail"]
        assert gate.cursor(into) == 2


def test_a_new_run_from_a_full_checkpoint_is_full(gate: Gate) -> None:
    path = gate.save(gate.run(**FULL), 1, "s").path
    made = gate.post("load_weights", path=path, optimizer=False, session_id=gate.session(), model_seq_id=0)
    info = gate.post("get_info", model_id=made.json()["model_id"]).json()
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    shown = types.WeightsInfoResponse.model_validate(gate.post("weights_info", tinker_path=path).json())
    assert (shown.is_lora, shown.lora_rank, shown.train_attn) == (False, None, None)


def test_the_files_of_a_full_checkpoint_are_a_model_directory(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text("{}")
    with opened(tmp_path / "data", (read_facts("tiny", folder), gates.OTHER)) as gate:
        run = gate.run(**FULL)
        checkpoint = gate.save(run, 1, "e", "external_weights")
        found = types.ExternalWeightsUrlsResponse.model_validate(
            gate.get(f"training_runs/{run}/checkpoints/external_weights/e/external_weights_urls").json()
        )
        assert set(found.urls) == {
            "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
            "chat_template.jinja",
        }  # fmt: skip
        config = json.loads(gate.client.get(found.urls["config.json"]).content)
        assert (config["model_type"], config["dtype"]) == ("llama", "float32")
        weights = gate.client.get(found.urls["model.safetensors"])
        assert weights.content == gate.objects.path(checkpoint.weights).read_bytes()
        tokenizer = gate.client.get(found.urls["tokenizer.json"])
        assert tokenizer.content == (folder / "tokenizer.json").read_bytes()
        other = found.urls["config.json"].replace("config.json", "adapter_config.json")
        assert problem(gate.client.get(other))["code"] == "file.unknown"
