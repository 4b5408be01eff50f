"""Exports against plain transformers and peft on the base and the checkpoint's own tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gradserve.compute.catalog import FAMILIES, read_facts
from gradserve.compute.engine.export import peft_folder
from gradserve.compute.engine.export.run import export
from gradserve.compute.exports import STAMP, CannotExport, DType, Format, Source, sha256
from gradserve.compute.tasks import InitTask
from gradserve.wire.ops import LoraConfig
from tests.models import build_tiny
from tests.numerics import reference
from tests.numerics.lab import Lab, plain_rows

RANK = 4
ATOL = 2e-5
"""Float32 sums in another order; the tests' models have log-probs around -8."""

HALF_ATOL = {"float16": 0.01, "bfloat16": 0.1}
"""Weights rounded once. Seen: 0.006 and 0.06."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family with a tied head (``llama``) and with one of its own (``llama-untied``)."""
    root = tmp_path_factory.mktemp("bases")
    tied = {family: build_tiny(root / family, family) for family in FAMILIES}
    return tied | {f"{f}-untied": build_tiny(root / f"{f}-untied", f, tie=False) for f in FAMILIES}


@pytest.fixture
def lab(bases: dict[str, Path], tmp_path: Path) -> Lab:
    return Lab(tmp_path / "objects", bases)


def source_of(lab: Lab, base: str, **flags: bool) -> Source:
    """A checkpoint with an adapter as if trained."""
    digest = lab.adapter(base, rank=RANK, **flags)
    lora = LoraConfig(RANK, 0, **flags)
    return Source(
        "tinker://s:train:0/weights/a", read_facts(base, lab.models[base]), lora, lab.store.path(digest), digest
    )


def full_source_of(lab: Lab, base: str) -> Source:
    """A checkpoint of all parameters, moved away from the base's."""
    initial = lab.arrays.get(lab.run(InitTask("init", base, None)).objects["weights"])
    generator = torch.Generator().manual_seed(5)
    moved = {name: t + 0.02 * torch.randn(t.shape, generator=generator) for name, t in sorted(initial.items())}
    digest = lab.arrays.put(moved)
    return Source(
        "tinker://s:train:0/weights/f", read_facts(base, lab.models[base]), None, lab.store.path(digest), digest
    )


def logprobs_by_peft(source: Source, folder: Path) -> list[Tensor]:
    model = reference.load_peft(Path(source.base.path), source.weights, folder, RANK)
    with torch.no_grad():
        return reference.logprobs(model, plain_rows())


def logprobs_of(model: Any) -> list[Tensor]:
    with torch.no_grad():
        return reference.logprobs(model.eval(), plain_rows())


def assert_close(found: list[Tensor], expected: list[Tensor], atol: float = ATOL) -> None:
    np.testing.assert_allclose(torch.cat(found).numpy(), torch.cat(expected).numpy(), atol=atol, rtol=0)


def stamped(folder: Path) -> Any:
    return json.loads((folder / STAMP).read_text())


@pytest.mark.parametrize("base", ["llama", "llama-untied", "qwen3", "qwen3-untied", "smollm3"])
def test_a_peft_folder_loads_in_peft(lab: Lab, base: str, tmp_path: Path) -> None:
    source = source_of(lab, base)
    exported = export(source, tmp_path / "out", "peft")
    assert exported.folder == tmp_path / "out"
    model = PeftModel.from_pretrained(reference.load(lab.models[base]), str(exported.folder))
    assert_close(logprobs_of(model), logprobs_by_peft(source, tmp_path / "reference"), 0)
    config = json.loads((exported.folder / "adapter_config.json").read_text())
    assert "lm_head" in config["target_modules"]
    assert sha256(exported.folder / "adapter_model.safetensors") == source.digest


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", ["", "-untied"])
def test_a_merged_model_is_base_plus_adapter(lab: Lab, family: str, head: str, tmp_path: Path) -> None:
    source = source_of(lab, family + head)
    exported = export(source, tmp_path / "out", "merged")
    model = AutoModelForCausalLM.from_pretrained(exported.folder)
    assert (exported.dtype, model.dtype) == ("float32", torch.float32)
    assert_close(logprobs_of(model), logprobs_by_peft(source, tmp_path / "reference"))
    assert not model.config.tie_word_embeddings
    assert any("tie_word_embeddings" in note for note in exported.notes) == (not head)
    mine, base = (AutoTokenizer.from_pretrained(folder) for folder in (exported.folder, lab.models[family]))
    assert mine("the answer is 42").input_ids == base("the answer is 42").input_ids
    assert mine.chat_template == base.chat_template


def test_without_an_adapter_on_it_the_head_stays_tied(lab: Lab, tmp_path: Path) -> None:
    source = source_of(lab, "llama", train_unembed=False, train_mlp=False)
    exported = export(source, tmp_path / "out", "merged")
    assert exported.notes == []
    assert "lm_head.weight" not in load_file(exported.folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(exported.folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_close(logprobs_of(model), logprobs_by_peft(source, tmp_path / "reference"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_merged_model_in_half_precision(lab: Lab, dtype: DType, tmp_path: Path) -> None:
    source = source_of(lab, "qwen2")
    exported = export(source, tmp_path / "out", "merged", dtype)
    stored = load_file(exported.folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, dtype)}
    model = AutoModelForCausalLM.from_pretrained(exported.folder, dtype=torch.float32)
    assert_close(logprobs_of(model), logprobs_by_peft(source, tmp_path / "reference"), HALF_ATOL[dtype])
    # Rounded once, after a sum in float32: not the sum of rounded parts.
    name = "model.layers.1.mlp.up_proj"
    adapter, own = load_file(source.weights), load_file(lab.models["qwen2"] / "model.safetensors")[name + ".weight"]
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    assert torch.equal(stored[name + ".weight"], (own + 32 / RANK * (b @ a)).to(getattr(torch, dtype)))


@pytest.mark.parametrize("base", ["llama", "llama-untied", "mistral", "qwen2", "qwen2-untied", "qwen3", "qwen3-untied"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_transformers_reads_the_gguf_back(lab: Lab, base: str, dtype: DType, tmp_path: Path) -> None:
    source = source_of(lab, base)
    exported = export(source, tmp_path / "out", "gguf", dtype)
    config = AutoConfig.from_pretrained(exported.folder, gguf_file="model.gguf")
    config.head_dim = AutoConfig.from_pretrained(lab.models[base]).head_dim  # transformers overlooks it for qwen
    model = AutoModelForCausalLM.from_pretrained(
        exported.folder, gguf_file="model.gguf", config=config, dtype=torch.float32
    )
    expected = logprobs_by_peft(source, tmp_path / "reference")
    assert_close(logprobs_of(model), expected, HALF_ATOL.get(dtype, ATOL))
    mine = AutoTokenizer.from_pretrained(exported.folder, gguf_file="model.gguf")
    own = AutoTokenizer.from_pretrained(lab.models[base])
    text = "<|im_start|>user\nthe 3 dogs and 1234 cats<|im_end|>\n"
    assert mine(text).input_ids == own(text).input_ids
    assert (mine.eos_token, mine.pad_token, mine.chat_template) == (own.eos_token, own.pad_token, own.chat_template)


def test_the_gguf_says_what_other_readers_need(lab: Lab, tmp_path: Path) -> None:
    import gguf

    folder = export(source_of(lab, "qwen3"), tmp_path / "out", "gguf", "float16").folder
    reader = gguf.GGUFReader(folder / "model.gguf")
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = json.loads((lab.models["qwen3"] / "config.json").read_text())
    expected = {
        "general.architecture": "qwen3",
        "general.file_type": 1,  # MOSTLY_F16
        "qwen3.block_count": config["num_hidden_layers"],
        "qwen3.embedding_length": config["hidden_size"],
        "qwen3.feed_forward_length": config["intermediate_size"],
        "qwen3.attention.head_count": config["num_attention_heads"],
        "qwen3.attention.head_count_kv": config["num_key_value_heads"],
        "qwen3.attention.key_length": config["head_dim"],
        "qwen3.context_length": config["max_position_embeddings"],
        "qwen3.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {name: facts[name] for name in expected} == expected
    assert len(facts["tokenizer.ggml.tokens"]) == config["vocab_size"]
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    assert types["blk.0.attn_q.weight"] == gguf.GGMLQuantizationType.F16
    assert types["blk.0.attn_q_norm.weight"] == gguf.GGMLQuantizationType.F32


@pytest.mark.parametrize("format", ["merged", "gguf"])
def test_a_checkpoint_of_all_parameters(lab: Lab, format: Format, tmp_path: Path) -> None:
    source = full_source_of(lab, "llama")
    exported = export(source, tmp_path / "out", format)
    model = reference.load(lab.models["llama"])
    own = dict(model.named_parameters())
    for name, tensor in load_file(source.weights).items():
        own[name].data.copy_(tensor)
    options: dict[str, Any] = {"gguf_file": "model.gguf"} if format == "gguf" else {}
    found = AutoModelForCausalLM.from_pretrained(exported.folder, **options)
    assert found.config.tie_word_embeddings
    assert_close(logprobs_of(found), logprobs_of(model))


def test_the_stamp_says_what_was_compared(lab: Lab, tmp_path: Path) -> None:
    source = source_of(lab, "llama")
    folder = export(source, tmp_path / "out", "merged").folder
    said = stamped(folder)
    assert (said["source"], said["weights_sha256"]) == (source.path, source.digest)
    assert said["files_sha256"]["model.safetensors"] == sha256(folder / "model.safetensors")
    assert said["base"]["sha256"]["model.safetensors"] == sha256(lab.models["llama"] / "model.safetensors")
    assert said["versions"]["torch"] == torch.__version__
    parity = said["parity"]
    assert parity["passed"] is True
    tokenizer = AutoTokenizer.from_pretrained(lab.models["llama"])
    assert parity["tokens"] == [tokenizer(text).input_ids[:64] for text in parity["texts"]]
    assert len(parity["tokens"]) == 4
    model = reference.load_peft(lab.models["llama"], source.weights, tmp_path / "reference", RANK)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    largest = max(
        float((_next_logprobs(model, prompt) - _next_logprobs(merged, prompt)).abs().max())
        for prompt in parity["tokens"]
    )
    # The engine is not the reference, so the figures agree only as far as both are right.
    assert abs(parity["max_abs_difference"] - largest) < ATOL


def _next_logprobs(model: Any, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, :-1]
    found: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return found


def test_a_damaged_artefact_is_kept_aside(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix of one layer lost: the sort of thing that no loader notices."""
    source = source_of(lab, "llama")
    written = peft_folder.write

    def damage(source: Source, dtype: DType, folder: Path) -> list[str]:
        notes = written(source, dtype, folder)
        tensors = load_file(folder / peft_folder.WEIGHTS)
        tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"].zero_()
        save_file(tensors, folder / peft_folder.WEIGHTS)
        return notes

    monkeypatch.setattr(peft_folder, "write", damage)
    exported = export(source, tmp_path / "out", "peft")
    assert not exported.parity.passed
    assert exported.folder == tmp_path / "out.failed-parity"
    assert not (tmp_path / "out").exists()
    said = stamped(exported.folder)["parity"]
    assert said["passed"] is False
    assert said["max_abs_difference"] > said["bound"]
    with pytest.raises(CannotExport, match="failed-parity exists"):
        export(source, tmp_path / "out", "peft")


def test_refusals(lab: Lab, bases: dict[str, Path], tmp_path: Path) -> None:
    source, full = source_of(lab, "llama"), full_source_of(lab, "llama")
    windowed = build_tiny(tmp_path / "windowed", "qwen3", window=24)
    large = _scaled(bases["llama"], tmp_path / "large", 1e7)
    there = tmp_path / "there"
    there.mkdir()
    cases: list[tuple[Source, Path, Format, DType | None, str]] = [
        (source, there, "peft", None, "exists"),
        (full, tmp_path / "x", "peft", None, "all parameters"),
        (source, tmp_path / "x", "peft", "float16", "byte for byte"),
        (source, tmp_path / "x", "gguf", "bfloat16", "not in bfloat16"),
        (source_of(lab, "smollm3"), tmp_path / "x", "gguf", None, "does not read smollm3"),
        (_on(source, windowed), tmp_path / "x", "gguf", None, "window of 24 tokens"),
        (_on(source, build_tiny(tmp_path / "wide", hidden=128)), tmp_path / "x", "merged", None, "right base"),
        (_on(source, _of_bytes(bases["llama"], tmp_path / "bytes")), tmp_path / "x", "gguf", None, "merges nothing"),
        (_on(source, large), tmp_path / "x", "merged", "float16", "can't hold"),
        (_on(source, large), tmp_path / "x", "gguf", "float16", "can't hold"),
    ]
    for refused, to, format, dtype, words in cases:
        with pytest.raises(CannotExport, match=words):
            export(refused, to, format, dtype)
        assert not list(tmp_path.glob("x*")), words


def _of_bytes(base: Path, to: Path) -> Path:
    """The same model with a tokenizer that has no merges."""
    shutil.copytree(base, to)
    file = to / "tokenizer.json"
    definition = json.loads(file.read_text())
    definition["model"]["merges"] = []
    file.write_text(json.dumps(definition))
    return to


def _on(source: Source, base: Path) -> Source:
    return Source(source.path, read_facts("other", base), source.lora, source.weights, source.digest)


def _scaled(base: Path, folder: Path, factor: float) -> Path:
    """The same model with one matrix too large for float16."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.layers[0].mlp.gate_proj.weight.data *= factor
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder
