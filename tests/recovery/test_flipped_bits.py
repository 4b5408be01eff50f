"""Bits flip on disk while no server runs: the next one computes the same arrays again, or says what is good."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path

import httpx
import pytest
import tinker
from click.testing import CliRunner

from gradserve.cli import main
from tests.processes import serve_on, stop
from tests.sdk import client, prompt, supervised, train

DATA = supervised(3, seed=4)


def flip_a_bit(file: Path) -> None:
    """In the last tensor; every name of the file sees it."""
    with open(file, "r+b") as opened:
        opened.seek(-100, 2)
        byte = opened.read(1)[0]
        opened.seek(-100, 2)
        opened.write(bytes([byte ^ 1]))


def folder_of(data_dir: Path, run: tinker.TrainingClient) -> Path:
    """Of the run's training checkpoints."""
    run_id: str = run.get_info().model_id
    return data_dir / "checkpoints" / run_id.replace(":", "_") / "weights"


def events(port: int, run_id: str) -> list[str]:
    found = httpx.get(f"http://127.0.0.1:{port}/api/v1/gradserve/runs/{run_id}/events", headers={"X-API-Key": "tml-x"})
    return [event["detail"] for event in found.json()["events"]]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_a_saved_state_with_a_flipped_bit(tiny_models: dict[str, str], data_dir: Path, name: str) -> None:
    models = {"tiny": tiny_models["tiny"]}
    port, server = serve_on(models, data_dir)
    run = client(f"http://127.0.0.1:{port}").create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    train(run, DATA, steps=2)
    run.save_state("old").result()
    train(run, DATA, steps=2)
    new = run.save_state("new").result().path
    undisturbed = train(run, DATA, steps=2)
    run_id = run.get_info().model_id
    file = folder_of(data_dir, run) / "new" / name
    stop(server)
    whole = file.read_bytes()
    flip_a_bit(file)
    port, server = serve_on(models, data_dir)
    try:
        service = client(f"http://127.0.0.1:{port}")
        resumed = service.create_training_client_from_state_with_optimizer(new).result()
        assert train(resumed, DATA, steps=2) == undisturbed
        assert file.read_bytes() == whole
        assert any("damaged" in detail and "computed again" in detail for detail in events(port, run_id))
    finally:
        stop(server)


def test_with_nothing_to_compute_it_from(tiny_models: dict[str, str], data_dir: Path) -> None:
    """The bodies have expired: training, sampling and exporting name the file and the older state, which is good."""
    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
    run = client(f"http://127.0.0.1:{port}").create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    train(run, DATA, steps=1)
    old = run.save_state("old").result().path
    undisturbed = train(run, DATA, steps=1)
    new = run.save_state("new").result().path
    file = folder_of(data_dir, run) / "new" / "adapter_model.safetensors"
    stop(server)
    flip_a_bit(file)
    with contextlib.closing(sqlite3.connect(data_dir / "gradserve.db")) as database:
        database.execute("DELETE FROM op_bodies")
        database.commit()
    offer = f"The next older good one is {re.escape(old)} \\(step 1\\)"
    to = ["--to", str(data_dir / "out"), "--base", tiny_models["tiny"]]
    exported = CliRunner(env={}).invoke(main, ["export", new, "--data-dir", str(data_dir), *to])
    assert re.search(offer, exported.stderr)
    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
    try:
        service = client(f"http://127.0.0.1:{port}")
        with pytest.raises(tinker.RequestFailedError, match=rf"objects/\w+.safetensors .*is damaged.*{offer}"):
            service.create_training_client_from_state_with_optimizer(new).result()
        with pytest.raises(tinker.RequestFailedError, match=offer):
            service.create_sampling_client(new).result().sample(
                prompt([20, 21]), 1, tinker.SamplingParams(max_tokens=2)
            ).result()
        resumed = service.create_training_client_from_state_with_optimizer(old).result()
        assert train(resumed, DATA, steps=1) == undisturbed
    finally:
        stop(server)
