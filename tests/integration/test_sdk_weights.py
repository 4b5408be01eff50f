"""The public SDK over a real socket: saving, loading, listing, expiring, downloading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyrage
import pytest
import tinker
from safetensors.numpy import load_file

from tests.sdk import adam, client, logprobs, supervised, train

DATA = supervised(4, seed=21)


@pytest.fixture
def service(url: str) -> tinker.ServiceClient:
    return client(url)


@pytest.fixture
def run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run with two steps behind it, so that the moments matter."""
    made = service.create_lora_training_client(base_model="tiny", rank=4, seed=9, user_metadata={"who": "me"}).result()
    train(made, DATA, steps=2)
    return made


def rest(run: tinker.TrainingClient, service: tinker.ServiceClient) -> Any:
    return service.create_rest_client()


def now(run: tinker.TrainingClient) -> list[list[float]]:
    return [row.tolist() for row in logprobs(run.forward(DATA, "cross_entropy").result())]


def test_with_optimizer_the_continuation_is_the_same_to_the_bit(
    run: tinker.TrainingClient, service: tinker.ServiceClient
) -> None:
    path = run.save_state("s").result().path
    assert path == f"tinker://{run.model_id}/weights/s"
    continued = train(run, DATA, steps=2)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert train(resumed, DATA, steps=2) == continued
    assert now(resumed) == now(run)


def test_without_optimizer_the_weights_are_the_same_and_the_moments_are_fresh(
    run: tinker.TrainingClient, service: tinker.ServiceClient
) -> None:
    path = run.save_state("s").result().path
    at_save = now(run)
    train(run, DATA, steps=2)
    fresh = service.create_training_client_from_state(path).result()
    assert now(fresh) == at_save
    train(fresh, DATA, steps=2)
    assert now(fresh) != now(run)
    info = fresh.get_info()
    assert (info.lora_rank, info.model_name) == (4, "tiny")


def test_loading_into_the_same_run_goes_back(run: tinker.TrainingClient) -> None:
    path = run.save_state("back").result().path
    before = now(run)
    continued = train(run, DATA, steps=1)
    run.load_state_with_optimizer(path).result()
    assert now(run) == before
    assert train(run, DATA, steps=1) == continued


def test_loading_drops_gradients_that_were_waiting(run: tinker.TrainingClient) -> None:
    path = run.save_state("clean").result().path
    run.forward_backward(DATA, "cross_entropy").result()
    run.load_state(path).result()
    metrics = run.optim_step(adam()).result().metrics
    assert metrics is not None
    assert metrics["step_skipped"] == 1.0


def test_a_used_name_is_refused_at_once_and_the_run_goes_on(run: tinker.TrainingClient) -> None:
    run.save_state("once").result()
    with pytest.raises((tinker.APIStatusError, ValueError, tinker.RequestFailedError), match="once exists"):
        run.save_state("once").result()
    assert len(train(run, DATA, steps=1)) == 1


def test_rest_client(run: tinker.TrainingClient, service: tinker.ServiceClient) -> None:
    run.save_state("a", ttl_seconds=7200).result()
    run.save_weights_for_sampler("b").result()
    api = service.create_rest_client()
    found = api.get_training_run(run.model_id).result()
    assert (found.base_model, found.lora_rank, found.is_lora) == ("tiny", 4, True)
    assert found.user_metadata == {"who": "me"}
    assert found.last_checkpoint is not None
    assert found.last_checkpoint.tinker_path.endswith("/weights/a")
    assert found.last_sampler_checkpoint is not None
    listed = api.list_checkpoints(run.model_id).result().checkpoints
    assert {checkpoint.checkpoint_id for checkpoint in listed} == {"weights/a", "sampler_weights/b"}
    by_id = {checkpoint.checkpoint_id: checkpoint for checkpoint in listed}
    assert by_id["weights/a"].expires_at is not None
    assert by_id["weights/a"].size_bytes > by_id["sampler_weights/b"].size_bytes > 0  # type: ignore[operator]
    assert run.model_id in {item.training_run_id for item in api.list_training_runs().result().training_runs}
    path = by_id["sampler_weights/b"].tinker_path
    assert api.get_training_run_by_tinker_path(path).result().training_run_id == run.model_id
    info = api.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank) == ("tiny", 4)
    api.publish_checkpoint_from_tinker_path(path).result()
    assert next(c for c in api.list_checkpoints(run.model_id).result().checkpoints if c.tinker_path == path).public
    api.unpublish_checkpoint_from_tinker_path(path).result()
    api.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    api.delete_checkpoint_from_tinker_path(path).result()
    left = api.list_checkpoints(run.model_id).result().checkpoints
    assert [checkpoint.checkpoint_id for checkpoint in left] == ["weights/a"]
    session_id = run.model_id.split(":")[0]
    session = api.get_session(session_id).result()
    assert run.model_id in session.training_run_ids
    assert session_id in api.list_sessions().result().sessions


def tinker_cli(url: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-test", "HOME": str(cwd)}
    command = [str(Path(sys.executable).parent / "tinker"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=120, check=False)


def test_the_tinker_command(run: tinker.TrainingClient, url: str, tmp_path: Path) -> None:
    path = run.save_state("for-cli").result().path

    def call(*arguments: str) -> Any:
        done = tinker_cli(url, "-f", "json", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) if done.stdout.strip().startswith(("{", "[")) else done.stdout

    assert run.model_id in json.dumps(call("run", "list", "--limit", "1000"))
    assert run.model_id in json.dumps(call("run", "info", run.model_id))
    assert path in json.dumps(call("checkpoint", "list", "--run-id", run.model_id))
    assert path in json.dumps(call("checkpoint", "list"))
    assert "for-cli" in json.dumps(call("checkpoint", "info", path))
    call("checkpoint", "publish", path)
    call("checkpoint", "unpublish", path)
    call("checkpoint", "set-ttl", path, "--ttl", "7200")
    call("checkpoint", "set-ttl", path, "--remove")
    assert "tiny" in json.dumps(call("model", "list"))
    call("checkpoint", "delete", path, "-y")
    assert path not in json.dumps(call("checkpoint", "list", "--run-id", run.model_id))


def test_a_downloaded_checkpoint_is_a_peft_adapter(
    run: tinker.TrainingClient, url: str, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    """``tinker checkpoint download``, then plain transformers + peft give the same log-probs."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = run.save_state("export").result().path
    done = tinker_cli(url, "checkpoint", "download", path, "--output", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = next(tmp_path.rglob("adapter_model.safetensors")).parent
    assert load_file(folder / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(tiny_models["tiny"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(folder))
    for item, ours in zip(DATA, logprobs(run.forward(DATA, "cross_entropy").result()), strict=True):
        tokens = torch.tensor([item.model_input.to_ints()])
        targets = torch.tensor(item.loss_fn_inputs["target_tokens"].tolist())
        with torch.no_grad():
            theirs = model(tokens).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


def test_an_encrypted_export_is_downloaded_and_decrypted(run: tinker.TrainingClient, url: str, tmp_path: Path) -> None:
    """``tinker checkpoint download`` keeps the .age files; decrypted with pyrage they are those of a plain export."""
    identity = pyrage.x25519.Identity.generate()
    secret = run.save_weights_external("secret", age_encryption_recipients=[str(identity.to_public())]).result().path
    plain = run.save_weights_external("plain").result().path
    folders = {}
    for path in (secret, plain):
        done = tinker_cli(url, "checkpoint", "download", path, "--output", str(tmp_path), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        folders[path] = tmp_path / path.replace("tinker://", "").replace("/", "_")
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert {file.name for file in folders[plain].iterdir()} == names
    assert {file.name for file in folders[secret].iterdir()} == {f"{name}.age" for name in names}
    for name in names:
        decrypted = pyrage.decrypt((folders[secret] / f"{name}.age").read_bytes(), [identity])
        assert decrypted == (folders[plain] / name).read_bytes()


def test_a_stranger_path_is_not_found(service: tinker.ServiceClient) -> None:
    missing = f"tinker://{uuid.uuid4()}:train:0/weights/nope"
    with pytest.raises((tinker.APIStatusError, ValueError), match="nope"):
        service.create_training_client_from_state(missing).result()
