"""Training all parameters of a base, by gradserve's one function beside the SDK and then by the SDK alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import gradserve
from gradserve.client.embedded import EmbeddedServer
from gradserve.client.extensions import bill
from tests.integration.test_sdk_weights import tinker_cli
from tests.processes import serve_on, stop
from tests.sdk import Floats, adam, client, datum, logprobs, prompt, sequences, supervised, train

DATA = supervised(6, seed=41)
ATOL = 1e-5


@pytest.fixture
def service(url: str) -> tinker.ServiceClient:
    return client(url)


@pytest.fixture
def run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run of all parameters with two steps behind it."""
    made = gradserve.create_full_training_client(service, "tiny", user_metadata={"who": "me"}).result()
    train(made, DATA, steps=2, learning_rate=1e-3)
    return made


def now(run: tinker.TrainingClient) -> list[list[float]]:
    return [row.tolist() for row in logprobs(run.forward(DATA, "cross_entropy").result())]


def plain_logprobs(model: Any, data: list[tinker.Datum]) -> list[Floats]:
    """The log-probs of the targets by transformers."""
    found = []
    for item in data:
        targets = torch.tensor(item.loss_fn_inputs["target_tokens"].tolist())
        with torch.no_grad():
            scores = model(torch.tensor([item.model_input.to_ints()])).logits[0].log_softmax(-1)
        found.append(scores.gather(1, targets[:, None])[:, 0].numpy())
    return found


def test_a_run_is_what_the_base_is_and_then_learns(service: tinker.ServiceClient, tiny_models: dict[str, str]) -> None:
    run = asyncio.run(_created(service))
    base = AutoModelForCausalLM.from_pretrained(tiny_models["tiny"], dtype=torch.float32)
    for ours, theirs in zip(now(run), plain_logprobs(base, DATA), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=ATOL)
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.0)
    for _ in range(3):
        run.forward_backward(DATA, "cross_entropy")
        run.optim_step(adam(1e-3, eps=1e-2)).result()
        optimizer.zero_grad()
        for item in DATA:
            targets = torch.tensor(item.loss_fn_inputs["target_tokens"].tolist())
            scores = base(torch.tensor([item.model_input.to_ints()])).logits[0].log_softmax(-1)
            torch.autograd.backward(-scores.gather(1, targets[:, None]).sum())
        optimizer.step()
    for ours, theirs in zip(now(run), plain_logprobs(base, DATA), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


async def _created(service: tinker.ServiceClient) -> tinker.TrainingClient:
    made: tinker.TrainingClient = await gradserve.create_full_training_client(service, "tiny")
    return made


def test_the_sampler_samples_the_version_it_was_made_of(run: tinker.TrainingClient) -> None:
    tokens = sequences(1, seed=4)[0]
    sampler = run.save_weights_and_get_sampling_client().result()
    parameters = tinker.SamplingParams(max_tokens=16, seed=3, stop=[])
    result = sampler.sample(prompt(tokens), 3, parameters).result()
    for sequence in result.sequences:
        whole = datum([*tokens, *sequence.tokens])
        scored = logprobs(run.forward([whole], "cross_entropy").result())[0]
        np.testing.assert_allclose(np.array(sequence.logprobs), scored[len(tokens) - 1 : -1], atol=ATOL)
    before = [list(sequence.tokens) for sequence in result.sequences]
    train(run, DATA, steps=1)
    again = sampler.sample(prompt(tokens), 3, parameters).result()
    assert [list(sequence.tokens) for sequence in again.sequences] == before


def test_a_checkpoint_continues_to_the_bit(run: tinker.TrainingClient, service: tinker.ServiceClient) -> None:
    path = run.save_state("s").result().path
    at_save = now(run)
    continued = train(run, DATA, steps=2, learning_rate=1e-3)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert now(resumed) == at_save
    assert train(resumed, DATA, steps=2, learning_rate=1e-3) == continued
    assert now(resumed) == now(run)
    run.load_state(path).result()
    assert now(run) == at_save
    assert resumed.get_info().is_lora is False


def test_the_rest_views(run: tinker.TrainingClient, service: tinker.ServiceClient, url: str, tmp_path: Path) -> None:
    path = run.save_weights_for_sampler("b").result().path
    api = service.create_rest_client()
    found = api.get_training_run(run.model_id).result()
    assert (found.base_model, found.lora_rank, found.is_lora) == ("tiny", None, False)
    assert found.user_metadata == {"who": "me"}
    info = api.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_mlp) == ("tiny", False, None, None)
    assert (run.get_info().is_lora, run.get_info().lora_rank) == (False, None)
    shown = tinker_cli(url, "run", "info", run.model_id, cwd=tmp_path)
    assert (shown.returncode, "Rank" in shown.stdout) == (0, False), shown.stdout + shown.stderr
    assert int(bill(url, run.model_id, "tml-test")["train_tokens"]) == 2 * sum(d.model_input.length for d in DATA)


def test_a_downloaded_checkpoint_is_a_model(run: tinker.TrainingClient, url: str, tmp_path: Path) -> None:
    """``tinker checkpoint download``, then plain transformers give the same log-probs, in float32."""
    path = run.save_state("export").result().path
    done = tinker_cli(url, "checkpoint", "download", path, "--output", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = next(tmp_path.rglob("model.safetensors")).parent
    assert_is_the_model(folder, run)


def assert_is_the_model(folder: Path, run: tinker.TrainingClient) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    for ours, theirs in zip(
        logprobs(run.forward(DATA, "cross_entropy").result()), plain_logprobs(model, DATA), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=ATOL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("the cat and the dog")) == "the cat and the dog"


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_folder_of_a_checkpoint_is_a_model(name: str, tmp_path: Path) -> None:
    """Of a base whose own files say bfloat16."""
    from tests.models import build_tiny

    base = build_tiny(tmp_path / "base", tie=name == "tied")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    assert json.loads((base / "config.json").read_text())["dtype"] == "bfloat16"
    server = EmbeddedServer({"half": str(base)}, tmp_path / "data")
    try:
        run = gradserve.create_full_training_client(client(server.url), "half").result()
        train(run, DATA, steps=1, learning_rate=1e-3)
        run.save_state("kept").result()
        folder = next((tmp_path / "data" / "checkpoints").rglob("model.safetensors")).parent
        assert (folder / "optimizer.safetensors").is_file()
        assert_is_the_model(folder, run)
    finally:
        server.stop()


def test_adapters_and_all_parameters_do_not_mix(run: tinker.TrainingClient, service: tinker.ServiceClient) -> None:
    lora = service.create_lora_training_client(base_model="tiny", rank=4).result()
    theirs, ours = lora.save_state("l").result().path, run.save_state("f").result().path
    for into, path in ((run, theirs), (lora, ours)):
        with pytest.raises((tinker.APIStatusError, ValueError, tinker.RequestFailedError), match="all parameters"):
            into.load_state(path).result()
    assert len(train(run, DATA, steps=1)) == len(train(lora, DATA, steps=1)) == 1


def test_a_full_run_and_adapters_on_one_base_at_once(service: tinker.ServiceClient) -> None:
    """All requests in flight together give what each gives alone."""

    def full() -> tinker.TrainingClient:
        return gradserve.create_full_training_client(service, "tiny").result()

    def adapters() -> tinker.TrainingClient:
        return service.create_lora_training_client(base_model="tiny", rank=4, seed=2).result()

    alone = [_work(run) for run in (full(), adapters())]
    futures = [_start(run) for run in (full(), adapters(), full(), adapters())]
    together = [_finish(*started) for started in futures]
    assert together == [*alone, *alone]


Started = tuple[tinker.TrainingClient, list[Any]]


def _start(run: tinker.TrainingClient) -> Started:
    work: list[Any] = []
    for _ in range(3):
        work.append(run.forward_backward(DATA, "cross_entropy"))
        run.optim_step(adam(1e-3))
    return run, work


def _finish(run: tinker.TrainingClient, work: list[Any]) -> tuple[list[float], list[list[int]]]:
    losses = [future.result().metrics["loss:sum"] for future in work]
    sampler = run.save_weights_and_get_sampling_client().result()
    result = sampler.sample(prompt([5, 6, 7]), 2, tinker.SamplingParams(max_tokens=8, seed=1, stop=[])).result()
    return losses, [list(sequence.tokens) for sequence in result.sequences]


def _work(run: tinker.TrainingClient) -> tuple[list[float], list[list[int]]]:
    return _finish(*_start(run))


def test_a_restarted_server_goes_on(tiny_models: dict[str, str], data_dir: Path) -> None:
    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
    try:
        run = gradserve.create_full_training_client(client(f"http://127.0.0.1:{port}"), "tiny").result()
        train(run, DATA, steps=2, learning_rate=1e-3)
        before = now(run)
        stop(server)
        _, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir, port)
        assert now(run) == before
        server.kill()
        server.wait()
        _, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir, port)
        assert now(run) == before
        assert len(train(run, DATA, steps=1)) == 1
    finally:
        stop(server)
