"""Exports of modules against the user's own class in plain torch, never against gradserve's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

from gradserve import load_module
from gradserve.compiler import capture_module
from gradserve.compute.engine.export.module_run import export
from gradserve.compute.exports import STAMP, CannotExport, ModuleFormat, ModuleSource, sha256
from gradserve.wire import graph as ir
from tests.modules import examples

NAMES = ("mlp", "cnn", "gru", "transformer")
ATOL = RTOL = 1e-6


def source_of(module: nn.Module, batch: Tensor, folder: Path) -> ModuleSource:
    """A checkpoint of the module, as a data directory holds it."""
    graph, tensors = capture_module(module, batch)
    weights = folder / "weights"
    weights.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    return ModuleSource("tinker://s:train:0/weights/a", ir.encode(graph), weights, sha256(weights))


def plain(module: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        result: Any = module(batch)
    return result if isinstance(result, dict) else {"output": result}


def other_batches(batch: Tensor) -> list[Tensor]:
    """Other numbers of rows than the module was captured with."""
    return [batch[:1], batch, torch.cat([batch, batch[:2], batch])]


@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_gives_what_torch_gives(name: str, tmp_path: Path) -> None:
    module, batch = examples()[name]
    exported = export(source_of(module, batch, tmp_path), tmp_path / "out", "onnx")
    file = exported.folder / "model.onnx"
    onnx.checker.check_model(onnx.load(file), full_check=True)
    session = onnxruntime.InferenceSession(file)
    (given,) = session.get_inputs()
    assert given.shape[0] == "B"
    for some in other_batches(batch):
        found = session.run(None, {given.name: some.numpy()})
        expected = plain(module, some)
        assert [output.name for output in session.get_outputs()] == list(expected)
        for mine, wanted in zip(found, expected.values(), strict=True):
            np.testing.assert_allclose(mine, wanted.numpy(), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_loads_into_the_class_and_without_it(name: str, tmp_path: Path) -> None:
    module, batch = examples()[name]
    source = source_of(module, batch, tmp_path)
    folder = export(source, tmp_path / "out", "safetensors").folder
    assert sha256(folder / "model.safetensors") == source.digest
    fresh = type(module)().eval()
    missing, unexpected = fresh.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert unexpected == []
    assert missing == (["head.weight"] if name == "transformer" else [])
    loaded = load_module(folder)
    for some in other_batches(batch):
        for wanted, own, anonymous in zip(
            plain(module, some).values(), plain(fresh, some).values(), plain(loaded, some).values(), strict=True
        ):
            assert torch.equal(own, wanted)
            torch.testing.assert_close(anonymous, wanted, atol=ATOL, rtol=RTOL)
    own_names = {name for name, _ in module.named_parameters()}
    assert {name for name, _ in loaded.named_parameters()} == own_names


def test_a_loaded_module_trains(tmp_path: Path) -> None:
    """Its gradients are the class's."""
    module, batch = examples()["mlp"]
    loaded = load_module(export(source_of(module, batch, tmp_path), tmp_path / "out", "safetensors").folder)
    for each in (module, loaded):
        torch.autograd.backward(each(batch)["logits"].logsumexp(-1).sum() + each(obs=batch)["value"].square().sum())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name).grad, parameter.grad, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("format", ["safetensors", "onnx"])
def test_the_stamp_says_what_was_compared(format: ModuleFormat, tmp_path: Path) -> None:
    module, batch = examples()["mlp"]
    source = source_of(module, batch, tmp_path)
    folder = export(source, tmp_path / "out", format).folder
    said = json.loads((folder / STAMP).read_text())
    assert (said["source"], said["weights_sha256"], said["format"]) == (source.path, source.digest, format)
    assert said["graph_sha256"] == ir.digest(source.graph)
    assert said["parity"]["batches"] == [1, 2, 5]
    assert set(said["parity"]["differences"]) == {"logits", "value"}
    assert said["parity"]["passed"] is True
    for file, digest in said["files_sha256"].items():
        assert sha256(folder / file) == digest
    assert said["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("format", ["safetensors", "onnx"])
def test_a_damaged_artefact_is_kept_aside(
    format: ModuleFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bias lost: the sort of thing that no loader notices."""
    from gradserve.compute.engine.export import module_run

    module, batch = examples()["gru"]
    source = source_of(module, batch, tmp_path)
    writer = module_run.WRITERS[format]
    written = writer.write

    def damage(source: ModuleSource, graph: ir.Graph, weights: dict[str, Tensor], folder: Path) -> None:
        weights["head.bias"] = torch.zeros(3)
        written(source, graph, weights, folder)
        if format == "safetensors":
            save_file(weights, folder / "model.safetensors")

    monkeypatch.setattr(writer, "write", damage)
    exported = export(source, tmp_path / "out", format)
    assert not exported.parity.passed
    assert exported.folder == tmp_path / "out.failed-parity"
    assert not (tmp_path / "out").exists()
    with pytest.raises(CannotExport, match="failed-parity exists"):
        export(source, tmp_path / "out", format)


def test_what_the_exporter_cannot_write_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batch = examples()["mlp"]
    source = source_of(module, batch, tmp_path)

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such operator: aten.tanh\nand a page of stack traces")

    monkeypatch.setattr(torch.onnx, "export", fails)
    with pytest.raises(CannotExport, match=r"no such operator: aten\.tanh\. Use --format safetensors\.$"):
        export(source, tmp_path / "out", "onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["weights"]
