"""``gradserve export`` and ``gradserve import`` around runs of the public SDK, over a real server."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from click.testing import CliRunner, Result
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from gradserve import create_full_training_client
from gradserve.cli import main
from gradserve.client import download
from gradserve.client.embedded import EmbeddedServer
from gradserve.client.extensions import ExtensionError
from tests.sdk import client, logprobs, supervised, train

DATA = supervised(4, seed=21)
ATOL = 1e-5


@pytest.fixture
def service(url: str) -> tinker.ServiceClient:
    return client(url)


@pytest.fixture
def run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    made = service.create_lora_training_client(base_model="tiny", rank=4, seed=9).result()
    train(made, DATA, steps=2)
    return made


@pytest.fixture
def online(url: str, tiny_models: dict[str, str]) -> dict[str, str]:
    """The environment of somebody who uses the server."""
    return {"GRADSERVE_URL": url, "TINKER_API_KEY": "tml-test", "GRADSERVE_MODELS": json.dumps(tiny_models)}


def gradserve(environment: dict[str, str], *arguments: str) -> Result:
    return CliRunner(env=environment).invoke(main, list(arguments))


def done(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def now(run: tinker.TrainingClient) -> list[list[float]]:
    return [row.tolist() for row in logprobs(run.forward(DATA, "cross_entropy").result())]


def plain_logprobs(model: Any) -> list[list[float]]:
    """The same rows through a transformers model."""
    found = []
    for item in DATA:
        targets = torch.tensor(item.loss_fn_inputs["target_tokens"].tolist())
        with torch.no_grad():
            logits = model(torch.tensor([item.model_input.to_ints()])).logits[0]
        found.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist())
    return found


def assert_close(found: list[list[float]], expected: list[list[float]]) -> None:
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=ATOL)


def test_there_and_back_is_the_same_to_the_bit(
    run: tinker.TrainingClient,
    service: tinker.ServiceClient,
    online: dict[str, str],
    tiny_models: dict[str, str],
    tmp_path: Path,
) -> None:
    path = run.save_state("s").result().path
    folder = tmp_path / "adapter"
    said = done(gradserve(online, "export", path, "--to", str(folder)))
    assert "parity check passed" in said
    base = AutoModelForCausalLM.from_pretrained(tiny_models["tiny"], dtype=torch.float32)
    assert_close(plain_logprobs(PeftModel.from_pretrained(base, str(folder))), now(run))

    imported = done(gradserve(online, "import", str(folder), "--base", "tiny", "--name", "back"))
    assert imported.startswith("tinker://import-")
    assert imported.endswith("/weights/back")
    assert done(gradserve(online, "import", str(folder), "--base", "tiny", "--name", "back")) == imported
    again = service.create_training_client_from_state(imported).result()
    assert now(again) == now(run)
    assert again.get_info().lora_rank == 4
    # A sampler takes it too, and it can be trained on, with fresh moments whichever way it is asked for.
    service.create_sampling_client(model_path=imported)
    asked = service.create_training_client_from_state_with_optimizer(imported).result()
    assert train(asked, DATA, steps=2) == train(again, DATA, steps=2)
    assert now(asked) == now(again) != now(run)


def test_an_adapter_on_two_modules_only(
    service: tinker.ServiceClient, online: dict[str, str], tiny_models: dict[str, str], tmp_path: Path
) -> None:
    """peft's most common form. It computes the same here, and training moves the modules that were added."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(tiny_models["tiny"], dtype=torch.float32)
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "a")
    result = gradserve(online, "import", str(tmp_path / "a"), "--base", "tiny")
    path = done(result)
    assert "k_proj, o_proj" in result.stderr
    run = service.create_training_client_from_state(path).result()
    assert_close(plain_logprobs(model.eval()), now(run))
    train(run, DATA, steps=1)
    done(gradserve(online, "export", run.save_state("on").result().path, "--to", str(tmp_path / "on")))
    trained = load_file(tmp_path / "on" / "adapter_model.safetensors")
    moved = [name for name, array in trained.items() if "lora_B" in name and array.any()]
    assert {name.split(".")[-3] for name in moved} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(("kind", "options"), [("merged", {}), ("gguf", {"gguf_file": "model.gguf"})])
def test_a_whole_model(
    run: tinker.TrainingClient, online: dict[str, str], kind: str, options: dict[str, str], tmp_path: Path
) -> None:
    path = run.save_weights_for_sampler("s").result().path
    result = gradserve(online, "export", path, "--to", str(tmp_path / "out"), "--format", kind)
    done(result)
    assert "tie_word_embeddings is false now" in result.stderr
    assert_close(plain_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options)), now(run))


def test_all_parameters(service: tinker.ServiceClient, online: dict[str, str], tmp_path: Path) -> None:
    run = create_full_training_client(service, "tiny").result()
    train(run, DATA, steps=1, learning_rate=1e-3)
    path = run.save_state("s").result().path
    refused = gradserve(online, "export", path, "--to", str(tmp_path / "x"))
    assert refused.exit_code == 1
    assert "merged already" in refused.stderr
    done(gradserve(online, "export", path, "--to", str(tmp_path / "out"), "--format", "merged"))
    assert_close(plain_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), now(run))


def test_an_adapter_of_peft_computes_the_same_here(
    service: tinker.ServiceClient, online: dict[str, str], tiny_models: dict[str, str], tmp_path: Path
) -> None:
    """Rank-stabilised and with another alpha, so that the scale must be folded in."""
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    config = LoraConfig(r=6, lora_alpha=5, use_rslora=True, target_modules=modules, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(tiny_models["tiny-qwen"], dtype=torch.float32)
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "a")
    path = done(gradserve(online, "import", str(tmp_path / "a"), "--base", "tiny-qwen"))
    run = service.create_training_client_from_state(path).result()
    assert_close(plain_logprobs(model.eval()), now(run))


def test_without_a_server(tiny_models: dict[str, str], data_dir: Path, tmp_path: Path) -> None:
    """From the data directory of a server that stopped; a flipped bit is found."""
    server = EmbeddedServer({"tiny": tiny_models["tiny"]}, data_dir)
    try:
        run = client(server.url).create_lora_training_client(base_model="tiny", rank=4, seed=9).result()
        train(run, DATA, steps=1)
        path = run.save_state("s").result().path
        expected = now(run)
    finally:
        server.stop()
    there, to = ("--data-dir", str(data_dir)), ("--to", str(tmp_path / "out"), "--format", "merged")
    unknown = gradserve({}, "export", path, *there, *to)
    assert unknown.exit_code == 1
    assert "--base DIR" in unknown.stderr
    done(gradserve({}, "export", path, *there, *to, "--base", tiny_models["tiny"]))
    assert_close(plain_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected)

    existing = gradserve({}, "export", path, *there, *to, "--base", tiny_models["tiny"])
    assert "exists and is not overwritten" in existing.stderr
    stamp = json.loads((tmp_path / "out" / "gradserve_export.json").read_text())
    stored = data_dir / "objects" / f"{stamp['weights_sha256']}.safetensors"
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.write_bytes(data)
    other = ("--to", str(tmp_path / "other"), "--base", tiny_models["tiny"])
    damaged = gradserve({}, "export", path, *there, *other)
    assert damaged.exit_code == 1
    assert "are damaged" in damaged.stderr
    stored.unlink()
    assert "are lost" in gradserve({}, "export", path, *there, *other).stderr
    assert "there is no checkpoint" in gradserve({}, "export", path + "x", *there, *other).stderr
    assert not (tmp_path / "other").exists()


def test_words_for_what_cannot_be_done(online: dict[str, str], tmp_path: Path) -> None:
    for path in ("tinker://nobody/weights/x", "nowhere"):
        refused = gradserve(online, "export", path, "--to", str(tmp_path / "x"))
        assert refused.exit_code == 1
        assert path in refused.stderr
    assert "running server" in gradserve({"GRADSERVE_URL": ""}, "import", str(tmp_path), "--base", "tiny").stderr
    assert "no adapter_config.json" in gradserve(online, "import", str(tmp_path), "--base", "tiny").stderr
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    refused = gradserve(online, "import", str(tmp_path), "--base", "tiny")
    assert refused.exit_code == 1
    assert "config.lora_alpha is None" in refused.stderr


@pytest.fixture
def flipping() -> Iterator[str]:
    """A server whose files are not what their digest promises."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            link = {"adapter_model.safetensors": f"http://{self.headers['Host']}/file"}
            body = b"damaged" if self.path == "/file" else json.dumps({"urls": link}).encode()
            promised = base64.b64encode(hashlib.sha256(b"whole").digest()).decode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Repr-Digest", f"sha-256=:{promised}:")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_download_is_compared_with_its_digest(flipping: str, tmp_path: Path) -> None:
    with pytest.raises(ExtensionError, match="damaged"):
        download.weights(flipping, "tinker://r:train:0/weights/x", "tml-test", tmp_path / "w")
