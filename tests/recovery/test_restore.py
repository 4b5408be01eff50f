"""The machine is gone with its disk; the archive is all that is left, and training goes on from it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tinker

from gradserve.compute.objects import shared_memory_root
from tests.recovery.disaster import Machine, machine
from tests.recovery.test_power_loss import new_run, state_of, train
from tests.s3 import s3_server
from tests.sdk import client

WAIT_S = 120.0

State = tuple[int, str, str]
"""Version, digests of weights and moments."""


def restore(url: str, data: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradserve", "restore", "--from", url, "--data-dir", str(data), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def wait_for_copy(here: Machine, since: float) -> None:
    """Until a copy of the database that was taken after ``since`` is in the archive with all that it needs."""
    deadline = time.monotonic() + WAIT_S
    while True:
        status = here.health()["archive"]
        assert status["error"] is None
        if (status["database_copied_at"] or 0.0) > since and status["waiting"] == 0:
            return
        assert time.monotonic() < deadline, f"no copy: {status}"
        time.sleep(0.2)


def save(here: Machine, run: tinker.TrainingClient, name: str) -> str:
    """The path of a saved state, as soon as it is in the archive."""
    since = time.time()
    path: str = run.save_state(name).result().path
    wait_for_copy(here, since)
    return path


def lose(here: Machine) -> None:
    """The machine with all that is on it."""
    here.cut_power()
    shutil.rmtree(here.data_dir)


@pytest.fixture(scope="module")
def undisturbed(tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """The states of a run that nothing happened to, by steps."""
    with machine({"tiny": tiny_models["tiny"]}, tmp_path_factory.mktemp("undisturbed")) as there:
        run = new_run(there)
        states = [state_of(there, run)]
        for step in range(4):
            train(run, 1, first=step)
            states.append(state_of(there, run))
        return states


@pytest.fixture
def models(tiny_models: dict[str, str]) -> dict[str, str]:
    return {"tiny": tiny_models["tiny"]}


def test_a_saved_state_goes_on_elsewhere_to_the_same_bits(
    models: dict[str, str], undisturbed: list[State], tmp_path: Path
) -> None:
    """Killed without warning. Steps after the save are lost with the disk, and are made again."""
    nas = tmp_path / "nas"
    with machine(models, tmp_path / "data", GRADSERVE_ARCHIVE_URL=nas.as_uri()) as here:
        run = new_run(here)
        train(run, 2)
        path = save(here, run, "kept")
        kept = here.get(f"runs/{run.model_id}/versions")["versions"]
        train(run, 1, first=2)
        lose(here)

    new = tmp_path / "new machine" / "data"
    done = restore(nas.as_uri(), new)
    assert done.returncode == 0, done.stderr
    assert f"{run.model_id}  tiny  step 2" in done.stdout
    assert "1 runs, 1 checkpoints, 1 durable steps; 2 arrays" in done.stdout
    assert "What was acknowledged after that time is lost" in done.stdout
    assert "--model tiny=SOURCE" in done.stdout
    assert (new / "gradserve.db").stat().st_mode & 0o777 == 0o600
    manifests = [json.loads(file.read_text()) for file in (nas / "manifests").rglob("*.json")]
    assert [found["entries"]["weights"]["digest"] for found in manifests] == [version["weights"] for version in kept]

    with machine(models, new, GRADSERVE_ARCHIVE_URL=nas.as_uri()) as there:
        folder = new / "checkpoints" / run.model_id.replace(":", "_") / "weights" / "kept"
        deadline = time.monotonic() + WAIT_S
        while not (folder / "optimizer.safetensors").exists():
            assert time.monotonic() < deadline, "the readable folder was not made again"
            time.sleep(0.1)
        service = client(there.url)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        train(resumed, 2, first=2)
        assert state_of(there, resumed)[1:] == undisturbed[4][1:]


def test_after_an_orderly_stop_even_the_script_goes_on(
    models: dict[str, str], undisturbed: list[State], tmp_path: Path
) -> None:
    """Nothing was saved and nothing is lost: the stop archives the newest state, and the same client continues."""
    nas = tmp_path / "nas"
    environment = {"GRADSERVE_ARCHIVE_URL": nas.as_uri()}
    with machine(models, tmp_path / "data", **environment) as here:
        run = new_run(here)
        train(run, 2)
        before = state_of(here, run)
        here.server.terminate()
        here.server.wait(60)
        shutil.rmtree(here.data_dir)
        assert not shared_memory_root(here.data_dir).exists()
        here.data_dir = tmp_path / "new"
        assert restore(nas.as_uri(), here.data_dir, "--lazy").returncode == 0
        assert not list(here.data_dir.glob("objects/*"))
        here.start()
        assert state_of(here, run) == before
        train(run, 1, first=2)
        after = state_of(here, run)
    assert after == undisturbed[3]


def test_a_damaged_copy_is_passed_over(models: dict[str, str], tmp_path: Path) -> None:
    """Of the newest copy one bit is another: the one before it is used, and that is said."""
    nas = tmp_path / "nas"
    with machine(models, tmp_path / "data", GRADSERVE_ARCHIVE_URL=nas.as_uri()) as here:
        run = new_run(here)
        train(run, 1)
        save(here, run, "one")
        train(run, 1, first=1)
        here.server.terminate()
        here.server.wait(60)
    older, newest = sorted((nas / "database").glob("*.db.zst"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    done = restore(nas.as_uri(), tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert "is passed over" in done.stderr
    assert newest.name in done.stderr
    assert f"{run.model_id}  tiny  step 1" in done.stdout

    older.write_bytes(b"")
    done = restore(nas.as_uri(), tmp_path / "newer")
    assert done.returncode == 1
    assert "all 2 copies of the database" in done.stderr
    assert not (tmp_path / "newer" / "gradserve.db").exists()


def test_from_s3_with_an_endpoint_given_as_an_option(
    models: dict[str, str], undisturbed: list[State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server("bucket") as endpoint:
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        url, option = "s3://bucket/gradserve", f"endpoint_url={endpoint}"
        environment = {
            "GRADSERVE_ARCHIVE_URL": url,
            "GRADSERVE_ARCHIVE_OPTIONS": json.dumps({"endpoint_url": endpoint}),
        }
        with machine(models, tmp_path / "data", **environment) as here:
            run = new_run(here)
            train(run, 2)
            path = save(here, run, "kept")
            lose(here)
        done = restore(url, tmp_path / "new", "--archive-option", option)
        assert done.returncode == 0, done.stderr
        with machine(models, tmp_path / "new", **environment) as there:
            resumed = client(there.url).create_training_client_from_state_with_optimizer(path).result()
            train(resumed, 1, first=2)
            assert state_of(there, resumed)[1:] == undisturbed[3][1:]


def test_two_servers_never_write_to_one_archive(models: dict[str, str], tmp_path: Path) -> None:
    """The old machine was only cut off: when it is back, the restored one owns the archive."""
    nas = tmp_path / "nas"
    environment = {"GRADSERVE_ARCHIVE_URL": nas.as_uri()}
    with machine(models, tmp_path / "old", **environment) as old:
        run = new_run(old)
        train(run, 1)
        save(old, run, "kept")
        assert restore(nas.as_uri(), tmp_path / "new").returncode == 0
        since = time.time()
        with machine(models, tmp_path / "new", **environment) as new:
            wait_for_copy(new, since)
            names = sorted(file.name for file in nas.rglob("*") if file.is_file())
            train(run, 1, first=1)
            run.save_state("too-late").result()
            deadline = time.monotonic() + WAIT_S
            while not (error := old.health()["archive"]["error"]):
                assert time.monotonic() < deadline, "the old one did not notice"
                time.sleep(0.2)
            assert "belongs to another data directory" in error
            assert sorted(file.name for file in nas.rglob("*") if file.is_file()) == names
    with machine(models, tmp_path / "fresh", **environment) as fresh:
        deadline = time.monotonic() + WAIT_S
        while not (error := fresh.health()["archive"]["error"]):
            assert time.monotonic() < deadline, "an empty data directory took the archive"
            time.sleep(0.2)
        assert f"gradserve restore --from {nas.as_uri()}" in error


def test_what_is_refused(tmp_path: Path) -> None:
    nas, full = tmp_path / "nas", tmp_path / "full"
    nas.mkdir()
    full.mkdir()
    (full / "gradserve.db").write_text("mine")
    done = restore(nas.as_uri(), tmp_path / "new")
    assert (done.returncode, "there is no copy of a database" in done.stderr) == (1, True)
    assert not any((tmp_path / "new").iterdir())
    done = restore(nas.as_uri(), full)
    assert (done.returncode, "is not empty (gradserve.db)" in done.stderr) == (1, True)
    assert (full / "gradserve.db").read_text() == "mine"
    done = restore("nfs", tmp_path / "new")
    assert (done.returncode, "is not a URL" in done.stderr) == (1, True)
    done = restore(nas.as_uri(), tmp_path / "new", "--archive-option", "endpoint")
    assert (done.returncode, "is not KEY=VALUE" in done.stderr) == (2, True)
