"""The disk with the arrays is gone, the database and the archive are there: saved states load, and steps continue."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gradserve.compute.objects import shared_memory_root
from tests.processes import serve_on, stop
from tests.sdk import client, supervised, train

DATA = supervised(3, seed=4)
WAIT_S = 120.0


def archived_all(port: int) -> bool:
    """Whether the archive has everything that is durable, by what the server says of itself."""
    status = httpx.get(f"http://127.0.0.1:{port}/api/v1/healthz").json()["archive"]
    assert status["error"] is None
    return bool(status["archived"] >= 2 and status["waiting"] == 0)


def test_a_saved_state_survives_the_loss_of_all_local_arrays(tiny_models: dict[str, str], data_dir: Path) -> None:
    archive = data_dir.parent / "nas"
    models = {"tiny": tiny_models["tiny"]}
    port, server = serve_on(models, data_dir, GRADSERVE_ARCHIVE_URL=archive.as_uri())
    service = client(f"http://127.0.0.1:{port}")
    run = service.create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    train(run, DATA, steps=2)
    path = run.save_state("kept").result().path
    undisturbed = train(run, DATA, steps=2)
    deadline = time.monotonic() + WAIT_S
    while not archived_all(port):
        assert time.monotonic() < deadline, "weights and moments were not uploaded"
        time.sleep(0.2)
    stop(server)
    shutil.rmtree(data_dir / "objects")
    shutil.rmtree(data_dir / "checkpoints")
    assert not shared_memory_root(data_dir).exists()
    port, server = serve_on(models, data_dir, GRADSERVE_ARCHIVE_URL=archive.as_uri())
    try:
        again = client(f"http://127.0.0.1:{port}")
        resumed = again.create_training_client_from_state_with_optimizer(path).result()
        assert train(resumed, DATA, steps=2) == undisturbed
    finally:
        stop(server)


def test_without_an_archive_healthz_says_nothing_of_one(url: str) -> None:
    assert "archive" not in httpx.get(f"{url}/api/v1/healthz").json()


def test_training_goes_on_while_the_archive_is_away(
    tiny_models: dict[str, str], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at that address: uploads fail, the alarm is in healthz, steps and saves are as always."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    port, server = serve_on(
        {"tiny": tiny_models["tiny"]},
        data_dir,
        GRADSERVE_ARCHIVE_URL="s3://bucket/prefix",
        GRADSERVE_ARCHIVE_OPTIONS='{"endpoint_url": "http://127.0.0.1:9"}',
    )
    try:
        run = client(f"http://127.0.0.1:{port}").create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
        train(run, DATA, steps=1)
        run.save_state("kept").result()
        deadline = time.monotonic() + WAIT_S
        status: dict[str, Any] = {"error": None}
        while status["error"] is None:
            assert time.monotonic() < deadline, "no alarm"
            assert len(train(run, DATA, steps=1)) == 1
            status = httpx.get(f"http://127.0.0.1:{port}/api/v1/healthz").json()["archive"]
        assert "s3://bucket/prefix" in str(status["error"])
        run.save_state("kept-too").result()
    finally:
        stop(server)
