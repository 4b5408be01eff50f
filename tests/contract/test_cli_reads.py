"""What the commands that read a data directory say when they can't."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gradserve.bootstrap import Paths
from gradserve.cli import main
from tests.contract.test_store_schema import _migrated

READING = [["runs"], ["run", "r"], ["program", "r"]]


@pytest.mark.parametrize("command", READING, ids=lambda command: str(command[0]))
@pytest.mark.parametrize("state", ["older", "damaged"])
def test_a_database_that_cannot_be_read_is_said_in_one_line(
    command: list[str], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADSERVE_URL", raising=False)
    database = Paths(tmp_path).database
    if state == "older":
        _migrated(database, "0001").close()
    else:
        database.write_bytes(b"no database at all" * 500)
    found = CliRunner().invoke(main, [*command, "--data-dir", str(tmp_path)])
    assert found.exit_code == 1
    assert found.output.startswith("Error: ")
    assert "Traceback" not in found.output
    assert ("brings an older database up to date" in found.output) == (state == "older")
