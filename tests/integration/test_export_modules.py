"""``gradserve export`` of a module that was trained through a real server: asked of the server, read from its disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load, load_file, save
from torch import Tensor

import gradserve
from gradserve.cli import main
from gradserve.client.modules import ModuleClient
from gradserve.compiler import capture_module, capture_program
from gradserve.wire import graph as ir
from gradserve.wire.ops import AdamParams
from tests.modules import Recurrent, examples
from tests.processes import serve_on, stop
from tests.sdk import client


@pytest.fixture(scope="module")
def place(tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server and its data directory."""
    folder = tmp_path_factory.mktemp("modules")
    port, server = serve_on(tiny_models, folder)
    yield f"http://127.0.0.1:{port}", folder
    stop(server)


@pytest.fixture(scope="module")
def trained(place: tuple[str, Path]) -> tuple[str, dict[str, Tensor]]:
    """The path of a GRU's checkpoint after three steps of regression, and its weights as the server gives them."""
    module, batch = examples()["gru"]
    forward, tensors = capture_module(module, batch)
    run = ModuleClient.create(client(place[0]), ir.encode(forward).decode(), save(tensors))

    def squared(model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = (model(batch["x"]) - batch["target"]).square().mean()
        return loss

    target = torch.randn(3, 3)
    program, _ = capture_program(squared, module, {"x": batch, "target": target})
    kept = run.keep(ir.encode(program).decode())
    for _ in range(3):
        run.apply({"x": batch.numpy(), "target": target.numpy()}, kept, backward=True)
        run.optim_step(AdamParams(learning_rate=0.05))
    path = run.save("trained").result()["path"]
    weights = load(run.weights())
    assert not torch.equal(weights["head.bias"], tensors["head.bias"])
    return path, weights


def export(place: tuple[str, Path], from_disk: bool, *arguments: str) -> Result:
    url, folder = place
    environment = {} if from_disk else {"GRADSERVE_URL": url, "TINKER_API_KEY": "tml-test"}
    where = ["--data-dir", str(folder)] if from_disk else []
    return CliRunner(env=environment).invoke(main, ["export", *arguments, *where])


@pytest.mark.parametrize("from_disk", [False, True])
def test_the_trained_weights_arrive(
    place: tuple[str, Path], trained: tuple[str, dict[str, Tensor]], from_disk: bool, tmp_path: Path
) -> None:
    path, weights = trained
    folder = tmp_path / "out"
    answer = export(place, from_disk, path, "--to", str(folder))
    assert answer.exit_code == 0, answer.output
    assert "parity check passed: outputs differ by" in answer.stdout
    module = Recurrent()
    module.load_state_dict(load_file(folder / "model.safetensors"))
    for name, tensor in weights.items():
        assert torch.equal(module.state_dict()[name], tensor)
    x = torch.randn(4, 6, 5)
    torch.testing.assert_close(gradserve.load_module(folder)(x), module(x), atol=1e-6, rtol=1e-6)
    assert json.loads((folder / "gradserve_export.json").read_text())["source"] == path

    answer = export(place, from_disk, path, "--to", str(tmp_path / "onnx"), "--format", "onnx")
    assert answer.exit_code == 0, answer.output
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    (found,) = session.run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, module(x).detach().numpy(), atol=1e-6, rtol=1e-6)


def test_formats_that_do_not_fit_are_refused(
    place: tuple[str, Path], trained: tuple[str, dict[str, Tensor]], tiny_models: dict[str, str], tmp_path: Path
) -> None:
    model = client(place[0]).create_lora_training_client(base_model="tiny", rank=2, seed=1).result()
    language = model.save_state("a").result().path
    base = ["--base", tiny_models["tiny"]]
    to = ["--to", str(tmp_path / "x")]
    for arguments, words in (
        ([trained[0], "--format", "peft"], "--format peft is for language models, and tinker://"),
        ([trained[0], "--format", "gguf"], "is a module. Use safetensors or onnx."),
        ([trained[0], "--format", "onnx", "--dtype", "float16"], "leave --dtype float16 out"),
        ([trained[0], *base], "it has no base model, leave --base out"),
        ([language, "--format", "onnx", *base], "--format onnx is for modules, and tinker://"),
        ([language, "--format", "safetensors", *base], "merged is a whole model in safetensors"),
    ):
        answer = export(place, False, *arguments, *to)
        assert answer.exit_code == 1, arguments
        assert words in answer.output.replace("\n", " "), answer.output
        assert list(tmp_path.iterdir()) == []
