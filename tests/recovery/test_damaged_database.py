"""The database's own disasters: a torn log, a read-only folder, a second server, a clock that jumps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gradserve.compute.objects import shared_memory_root
from tests.processes import free_port, serve_on, stop
from tests.recovery.disaster import HEADERS, machine
from tests.recovery.test_power_loss import new_run, state_of, train


def test_a_write_ahead_log_cut_in_the_middle_of_a_write(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """Half a frame at the end of the log, as a power cut leaves it: what was acknowledged before it is there."""
    with machine({"tiny": tiny_models["tiny"]}, tmp_path / "data") as here:
        run = new_run(here)
        train(run, 2)
        before = state_of(here, run)
        here.cut_power()
        log = here.data_dir / "gradserve.db-wal"
        assert log.stat().st_size > 4096
        with open(log, "ab") as torn:
            torn.write(os.urandom(1500))
        here.start()
        assert state_of(here, run) == before
        train(run, 1, first=2)
        assert state_of(here, run)[0] == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the next test covers what root sees")
def test_a_read_only_folder_is_refused_at_the_start(tiny_models: dict[str, str], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        _refused(tiny_models, tmp_path / "data")
    finally:
        tmp_path.chmod(0o700)


def test_a_data_directory_that_cannot_be_made_is_refused_at_the_start(
    tiny_models: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    _refused(tiny_models, tmp_path / "file" / "data")


def _refused(models: dict[str, str], data: Path) -> None:
    command = [sys.executable, "-m", "gradserve", "serve", "--port", str(free_port()), "--data-dir", str(data)]
    ran = subprocess.run([*command, "--model", f"tiny={models['tiny']}"], capture_output=True, text=True, timeout=120)
    assert ran.returncode != 0
    assert str(data) in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_server_that_slept_through_a_takeover_writes_nothing(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """SIGSTOP, another server on the same data, SIGCONT: the first finds itself fenced off, says so and stops."""
    data = tmp_path / "data"
    with machine({"tiny": tiny_models["tiny"]}, data) as here:
        run = new_run(here)
        train(run, 1)
        before = state_of(here, run)
        os.kill(here.server.pid, signal.SIGSTOP)
        # Locks of files do not always reach as far as the files do (NFS): as if this one had not held.
        (data / "server.lock").unlink()
        port, second = serve_on({"tiny": tiny_models["tiny"]}, data)
        try:
            os.kill(here.server.pid, signal.SIGCONT)
            session = {"tags": [], "sdk_version": "0.38.0", "type": "create_session"}
            answer = httpx.post(f"{here.url}/api/v1/create_session", json=session, headers=HEADERS, timeout=30)
            assert answer.status_code == 503
            assert "taken this data directory over" in answer.json()["detail"]
            row = httpx.get(f"http://127.0.0.1:{port}/api/v1/gradserve/runs/{run.model_id}", headers=HEADERS).json()
            assert (row["run"]["version"], row["run"]["weights"], row["run"]["moments"]) == before
            stop(here.server)
            there = {file.stem for file in shared_memory_root(data).glob("*.safetensors")}
            assert set(before[1:]) <= there, "what it leaves belongs to the other"
        finally:
            stop(second)


def test_a_clock_that_jumps_expires_nothing_early(tmp_path: Path) -> None:
    """The wall clock a year ahead for a while (a dead battery, a wrong NTP server): checkpoints with a TTL stay."""
    from gradserve.orchestration.clock import SteadyClock

    wall, steady = [1_000_000.0], [50.0]
    clock = SteadyClock(lambda: wall[0], lambda: steady[0])

    def doubts() -> list[bool]:
        return [clock.suspicious]

    assert clock.now() == 1_000_000.0
    wall[0] += 60.0
    steady[0] += 60.0
    assert clock.now() == 1_000_060.0
    wall[0] += 365 * 86400.0
    steady[0] += 5.0
    assert clock.now() == 1_000_065.0, "believed only after it has stood for an hour"
    assert doubts() == [True]
    wall[0] += 3600.0
    steady[0] += 3600.0
    assert clock.now() == wall[0]
    assert doubts() == [False]
    wall[0] -= 7200.0
    steady[0] += 1.0
    assert clock.now() >= 1_000_065.0
    assert clock.now() == wall[0], "a jump back expires nothing, so it is believed at once"
