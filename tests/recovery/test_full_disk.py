"""The disk of the durable tier fills up under a running server: the save fails with its reason, training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker

from gradserve.compute.objects import shared_memory_root
from tests.disks import small_disk
from tests.processes import serve_on, stop
from tests.sdk import client, supervised, train

DATA = supervised(3, seed=8)


def fill(file: Path) -> None:
    """Write until the disk is full."""
    with open(file, "wb", buffering=0) as opened:
        while True:
            opened.write(b"\0" * 4096)


def test_a_save_that_finds_no_room_fails_alone(tiny_models: dict[str, str], data_dir: Path) -> None:
    with small_disk(data_dir / "objects", "8m") as disk:
        port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir)
        try:
            service = client(f"http://127.0.0.1:{port}")
            run, undisturbed = (
                service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result() for _ in range(2)
            )
            assert train(run, DATA, steps=2) == train(undisturbed, DATA, steps=2)
            kept = run.save_state("kept").result().path
            train(run, DATA, steps=1)
            train(undisturbed, DATA, steps=1)
            ballast = disk / "ballast"
            with pytest.raises(OSError, match="No space left"):
                fill(ballast)
            before = {file.name: file.read_bytes() for file in disk.iterdir() if file != ballast}
            with pytest.raises(tinker.RequestFailedError, match="no room left"):
                run.save_state("refused").result()
            assert {file.name: file.read_bytes() for file in disk.iterdir() if file != ballast} == before
            assert train(run, DATA, steps=1) == train(undisturbed, DATA, steps=1), "nothing was lost"
            ballast.unlink()
            now_kept = run.save_state("refused").result().path
            for path in (kept, now_kept):
                service.create_training_client_from_state_with_optimizer(path).result()
            resumed = service.create_training_client_from_state_with_optimizer(now_kept).result()
            assert train(resumed, DATA, steps=2) == train(undisturbed, DATA, steps=2)
        finally:
            stop(server)


def test_a_server_that_stops_on_a_full_disk_stops_in_order(
    tiny_models: dict[str, str], data_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What can't be copied stays in shared memory, and the next server goes on from it."""
    models = {"tiny": tiny_models["tiny"]}
    with small_disk(data_dir / "objects", "8m") as disk:
        port, server = serve_on(models, data_dir)
        run = client(f"http://127.0.0.1:{port}").create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
        train(run, DATA, steps=2)
        ballast = disk / "ballast"
        with pytest.raises(OSError, match="No space left"):
            fill(ballast)
        stop(server)
        full = server.returncode
        said = capfd.readouterr().err
        assert said.count("shared memory keeps them for the next start") == 1
        assert "no room left" in said
        assert "Traceback" not in said
        kept = shared_memory_root(data_dir)
        weights = {file.name for file in kept.glob("*.safetensors")}
        assert len(weights) >= 2, "weights and moments"
        ballast.unlink()
        port, server = serve_on(models, data_dir)
        stop(server)
        assert server.returncode == full, "ended as if there had been room"
        assert weights.intersection(file.name for file in disk.iterdir()), "copied at last"
        assert not kept.exists()
