"""gradserve reward test: what it prints and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradserve.cli import main

SOUND = "from gradserve.rewards import exact\n_compare = exact()\ndef judge(completion, answer): return %s\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["reward", "test", *map(str, arguments)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOUND % "{'right': _compare(completion, answer), 'brief': 0.5}")
    return path


def test_a_sound_reward(file: Path) -> None:
    result = run(file)
    assert result.exit_code == 0, result.output
    assert "right 1, brief 0.5" in result.output
    assert "rewards from 0.5 to 1.5" in result.output
    assert "ms (median)" in result.output
    assert "nothing wrong was found" in result.output


def test_a_reward_with_faults(file: Path) -> None:
    file.write_text("import random\ndef judge(completion, answer): return random.random() / len(completion)")
    result = run(f"{file}:judge")
    assert result.exit_code == 1
    assert "wrong: crash on 'empty': ZeroDivisionError" in result.output
    assert "wrong: not deterministic on 'as given'" in result.output


def test_the_users_own_rows(file: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": "of two\u2028lines", "completion": "a", "answer": right} for right in "ab"]
    data.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    result = run(file, "--data", data, "--range", 0, 1)
    assert "wrong: out of range on '1: as given': 1.5 is not in [0, 1]" in result.output
    assert "'2: as given'" not in result.output
    data.write_text('{"completion": "a"}')
    assert "row 1: KeyError('prompt')" in run(file, "--data", data).output


def test_what_cannot_be_checked_is_said(file: Path, tmp_path: Path) -> None:
    file.write_text("def one(completion): return 1\ndef two(completion): return 2\n")
    assert f"which is the reward in {file}? Name it, {file}:FUNCTION: one, two" in run(file).output
    assert "there is no three in" in run(f"{file}:three").output
    assert "can't be read" in run(tmp_path / "absent.py").output
    assert "the smaller number first" in run(f"{file}:one", "--range", 1, 0).output
    assert all(run(target).exit_code == 1 for target in (file, f"{file}:three", tmp_path / "absent.py"))
