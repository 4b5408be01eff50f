"""POST gradserve/import: adapters that peft saved, and everything that is refused."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save
from transformers import AutoModelForCausalLM

from gradserve.compute.catalog import read_facts
from tests.contract.gateway.gate import Gate, opened, problem
from tests.models import build_tiny

GROUPS = {
    "train_attn": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "train_mlp": ["gate_proj", "up_proj", "down_proj"],
    "train_unembed": ["lm_head"],
}
ALL = [name for group in GROUPS.values() for name in group]
A_LAYER = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"

Tensors = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {"tied": build_tiny(root / "tied"), "untied": build_tiny(root / "untied", "qwen3", tie=False)}


@pytest.fixture
def gate(bases: dict[str, Path], tmp_path: Path) -> Iterator[Gate]:
    with opened(tmp_path, tuple(read_facts(name, path) for name, path in bases.items()), max_lora_rank=16) as gate:
        yield gate


def saved_by_peft(base: Path, folder: Path, **options: Any) -> tuple[dict[str, Any], Tensors]:
    """adapter_config.json and tensors of an adapter with a random B, as peft writes them."""
    settings = {"r": 4, "lora_alpha": 32, "target_modules": ALL, "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    model.save_pretrained(folder)
    return json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")


def send(gate: Gate, config: dict[str, Any], tensors: Tensors | bytes, base: str = "tied", **fields: Any) -> Any:
    weights = tensors if isinstance(tensors, bytes) else save(tensors)
    sent = {"base": base, "config": config, "weights": base64.b64encode(weights).decode(), **fields}
    return gate.post("gradserve/import", **sent)


def stored(gate: Gate, answer: Any) -> Tensors:
    assert answer.status_code == 200, answer.text
    tensors: Tensors = load_file(gate.objects.path(answer.json()["weights"]))
    return tensors


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_an_adapter_of_peft_becomes_a_checkpoint(gate: Gate, bases: dict[str, Path], base: str, tmp_path: Path) -> None:
    config, tensors = saved_by_peft(bases[base], tmp_path / "a")
    assert any(name.endswith("lm_head.base_layer.weight") for name in tensors)  # peft's copy of the base's own head
    answer = send(gate, config, tensors, base, name="mine")
    kept = stored(gate, answer)
    expected = {name: array for name, array in tensors.items() if "base_layer" not in name}
    assert kept.keys() == expected.keys()
    assert all(np.array_equal(kept[name], array) for name, array in expected.items())
    path = answer.json()["path"]
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    assert (kind, name) == ("weights", "mine")
    assert run_id.startswith("import-")
    info = gate.post("weights_info", tinker_path=path).json()
    assert (info["base_model"], info["lora_rank"]) == (base, 4)
    assert (info["train_attn"], info["train_mlp"], info["train_unembed"]) == (True, True, True)
    assert gate.objects.has_durable(answer.json()["weights"])
    checkpoint = gate.on_loop(lambda: gate.store.get_checkpoint("local", run_id, kind, name))
    assert checkpoint is not None
    assert (checkpoint.version, checkpoint.moments) == (0, None)
    assert checkpoint.weights in gate.on_loop(gate.store.live_digests)


@pytest.mark.parametrize("flag", GROUPS)
def test_a_group_of_layers_becomes_a_flag(gate: Gate, bases: dict[str, Path], flag: str, tmp_path: Path) -> None:
    config, tensors = saved_by_peft(bases["tied"], tmp_path / "a", target_modules=GROUPS[flag])
    answer = send(gate, config, tensors)
    assert answer.status_code == 200, answer.text
    lora = answer.json()["lora"]
    assert answer.json()["notice"] is None
    assert {name: lora[name] for name in GROUPS} == {name: name == flag for name in GROUPS}


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": GROUPS["train_mlp"], "layers_to_transform": [1]},
    ],
)
def test_modules_that_a_group_lacks_are_added_without_effect(
    gate: Gate, bases: dict[str, Path], options: dict[str, Any], tmp_path: Path
) -> None:
    """The same log-probs as peft has, by peft itself; A as a new run's: uniform within 1 / sqrt(in)."""
    config, tensors = saved_by_peft(bases["tied"], tmp_path / "a", **options)
    answer = send(gate, config, tensors)
    kept = stored(gate, answer)
    lora, added = answer.json()["lora"], answer.json()["added_modules"]
    wanted = [name for flag, group in GROUPS.items() if lora[flag] for name in group]
    assert {name.split(".")[-3] for name in kept} == set(wanted)
    assert all(np.array_equal(kept[name], array) for name, array in tensors.items())
    fresh = sorted(kept.keys() - tensors.keys())
    assert [name for name in fresh if "lora_A" in name] == [f"base_model.model.{name}.lora_A.weight" for name in added]
    for name in fresh:
        if "lora_B" in name:
            assert not kept[name].any()
        else:
            bound = 1 / math.sqrt(kept[name].shape[1])
            assert bound * 0.9 < np.abs(kept[name]).max() <= bound
            # of a uniform distribution on +-bound the mean is 0 and the deviation bound / sqrt(3)
            assert abs(kept[name].mean()) < 5 * bound / math.sqrt(3 * kept[name].size)
            assert np.isclose(kept[name].std(), bound / math.sqrt(3), rtol=0.2)
    assert f"{len(added)} modules" in answer.json()["notice"]
    assert send(gate, config, tensors).json() == answer.json(), "the same again"

    filled = dict(config, lora_alpha=32, target_modules=wanted, layers_to_transform=None)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "adapter_config.json").write_text(json.dumps(filled))
    (tmp_path / "b" / "adapter_model.safetensors").write_bytes(save(kept))
    tokens = torch.arange(20, 40)[None]
    logits = []
    for folder in ("a", "b"):
        base = AutoModelForCausalLM.from_pretrained(bases["tied"], dtype=torch.float32)
        with torch.no_grad():
            logits.append(PeftModel.from_pretrained(base, str(tmp_path / folder))(tokens).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("options", "scale"),
    [({"lora_alpha": 8}, 2.0), ({"lora_alpha": 16, "use_rslora": True}, 8.0), ({"r": 3, "lora_alpha": 7}, 7 / 3)],
)
def test_another_scale_is_folded_into_b(
    gate: Gate, bases: dict[str, Path], options: dict[str, Any], scale: float, tmp_path: Path
) -> None:
    """Ours is 32 / r always; what both compute is scale * B A."""
    config, tensors = saved_by_peft(bases["tied"], tmp_path / "a", **options)
    kept = stored(gate, send(gate, config, tensors))
    rank = config["r"]
    for name in (name for name in kept if name.endswith("lora_B.weight")):
        a = name.replace("lora_B", "lora_A")
        assert np.array_equal(kept[a], tensors[a])
        ours = 32 / rank * kept[name].astype(np.float64)
        np.testing.assert_allclose(ours, scale * tensors[name].astype(np.float64), rtol=2**-24)


def test_half_precision_is_widened(gate: Gate, bases: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save as save_torch

    config, _ = saved_by_peft(bases["tied"], tmp_path / "a")
    tensors = load_torch(tmp_path / "a" / "adapter_model.safetensors")
    for dtype in (torch.bfloat16, torch.float16):
        narrow = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        kept = stored(gate, send(gate, config, save_torch(narrow)))
        assert all(torch.equal(torch.from_numpy(kept[name].copy()), narrow[name].float()) for name in kept)


def test_the_same_again_is_the_same_checkpoint(gate: Gate, bases: dict[str, Path], tmp_path: Path) -> None:
    config, tensors = saved_by_peft(bases["tied"], tmp_path / "a")
    first = send(gate, config, tensors).json()
    run_id, kind, name = first["path"].removeprefix("tinker://").split("/")
    gate.call("POST", f"training_runs/{run_id}/checkpoints/{kind}/{name}/publish")
    assert send(gate, config, tensors).json() == first
    again = gate.on_loop(lambda: gate.store.get_checkpoint("local", run_id, kind, name))
    assert again is not None
    assert again.public  # what was said about it since then holds


def test_tenants_do_not_meet(bases: dict[str, Path], tmp_path: Path) -> None:
    keys = ("tml-one-one-one-one-one", "tml-two-two-two-two-two")
    config, tensors = saved_by_peft(bases["tied"], tmp_path / "a")
    with opened(tmp_path, (read_facts("tied", bases["tied"]),), api_keys=keys) as gate:
        paths = []
        for gate.key in keys:
            paths.append(send(gate, config, tensors).json()["path"])
        assert len(set(paths)) == 2
        assert gate.post("weights_info", tinker_path=paths[1]).status_code == 200
        assert gate.post("weights_info", tinker_path=paths[0]).status_code == 404


def _changed(name: str, change: Any) -> Any:
    def apply(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return apply


def _without(name: str) -> Any:
    return lambda config, tensors: tensors.pop(name)


def _config(**fields: Any) -> Any:
    return lambda config, tensors: config.update(fields)


def _only(*modules: str) -> Any:
    def apply(config: dict[str, Any], tensors: Tensors) -> None:
        for name in list(tensors):
            if name.split(".")[-3] not in modules:
                del tensors[name]

    return apply


def _renamed(config: dict[str, Any], tensors: Tensors) -> None:
    for part in "AB":
        name = A_LAYER.replace("lora_B", f"lora_{part}")
        tensors[name.replace("up_proj", "c_fc")] = tensors.pop(name)


REFUSED = [
    (_config(peft_type="LOHA"), "unsupported.adapter", "config.peft_type"),
    (_config(use_dora=True), "unsupported.adapter", "config.use_dora"),
    (_config(bias="all"), "unsupported.adapter", "config.bias"),
    (_config(modules_to_save=["embed_tokens"]), "unsupported.adapter", "config.modules_to_save"),
    (_config(rank_pattern={"q_proj": 8}), "unsupported.adapter", "config.rank_pattern"),
    (_config(alpha_pattern={"q_proj": 8}), "unsupported.adapter", "config.alpha_pattern"),
    (_config(init_lora_weights="pissa"), "unsupported.adapter", "config.init_lora_weights"),
    (_config(fan_in_fan_out=True), "unsupported.adapter", "config.fan_in_fan_out"),
    (_config(of_next_year={"x": 1}), "unsupported.adapter", "config.of_next_year"),
    (_config(r=17), "lora.rank", "config.r"),
    (_config(r=0), "adapter.config", "config.r"),
    (_config(r=8), "adapter.shape", "weights"),
    (_config(lora_alpha=None), "adapter.config", "config.lora_alpha"),
    (_config(lora_alpha=-1), "adapter.config", "config.lora_alpha"),
    (_config(lora_alpha=1e300), "adapter.not_finite", "weights"),
    (_without(A_LAYER), "adapter.tensors", "weights"),
    (_only(), "adapter.modules", "weights"),
    (_renamed, "adapter.modules", "weights"),
    (_changed(A_LAYER, lambda b: b[:-1]), "adapter.shape", "weights"),
    (_changed(A_LAYER, lambda b: np.full_like(b, math.nan)), "adapter.not_finite", "weights"),
    (_changed("base_model.model.lm_head.base_layer.weight", lambda w: w + 1), "adapter.tensors", "weights"),
    (_changed(A_LAYER, lambda b: b.astype(np.int32)), "adapter.file", "weights"),
]


@pytest.mark.parametrize(("damage", "code", "field"), REFUSED)
def test_refused(gate: Gate, bases: dict[str, Path], damage: Any, code: str, field: str, tmp_path: Path) -> None:
    config, tensors = saved_by_peft(bases["tied"], tmp_path / "a")
    damage(config, tensors)
    answer = send(gate, config, tensors)
    assert answer.status_code == 400
    said = problem(answer)
    assert (said["code"], said["field"]) == (code, field), said
    assert gate.get("checkpoints").json()["checkpoints"] == []


@pytest.mark.parametrize("cut", [0, 4, 8, 200, -1])
def test_a_file_cut_short_is_refused(gate: Gate, bases: dict[str, Path], cut: int, tmp_path: Path) -> None:
    config, tensors = saved_by_peft(bases["tied"], tmp_path / "a")
    said = problem(send(gate, config, save(tensors)[:cut]))
    assert (said["status"], said["code"]) == (400, "adapter.file")


def test_other_fields(gate: Gate, bases: dict[str, Path], tmp_path: Path) -> None:
    config, tensors = saved_by_peft(bases["tied"], tmp_path / "a")
    assert problem(send(gate, config, tensors, base="nobody"))["code"] == "model.unknown"
    assert problem(send(gate, config, tensors, name="../up"))["code"] == "checkpoint.name"
    assert problem(send(gate, config, tensors, other=1))["code"] == "body.unknown_field"
    assert problem(gate.post("gradserve/import", base="tied", config=config, weights="?"))["code"] == "body.type"
