"""gradserve data show: what it prints, where it finds problems, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gradserve.cli import main
from tests.templates import QWEN3, SMOLLM2, with_template

TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def rows(file: Path, *lines: Any) -> Path:
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def show(*arguments: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["data", "show", *map(str, arguments)], env=env)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    with_template(SMOLLM2).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_trained_spans_stand_in_brackets_or_are_green(model: Path, tmp_path: Path) -> None:
    file = rows(tmp_path / "talk.jsonl", {"messages": TALK}, {"prompt": "2 + 2 =", "completion": " 4"}, {"text": "x"})
    result = show(file, "--model", model, "--rows", 2)
    assert result.exit_code == 0, result.output
    assert "user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n<|im_start|>user\nc<|im_end|>\n" in result.output
    assert "⟦d<|im_end|>⟧\n" in result.output
    assert f"{file}, line 2: 10 tokens, 3 trained\n2 + 2 =⟦ 4<|im_end|>⟧\n" in result.output
    assert "line 3: " not in result.output
    assert "3 rows: " in result.output
    last = show(file, "--model", model, "--train", "last").output
    assert "assistant\nb<|im_end|>\n" in last
    assert "⟦d<|im_end|>⟧" in last
    green = show(file, "--model", model, env={"FORCE_COLOR": "1", "TERM": "xterm", "COLORTERM": ""}).output
    assert "\x1b[1;32mb<|im_end|>\x1b[0m" in green
    assert "⟦" not in green


def test_problems_are_named_by_file_and_line(model: Path, tmp_path: Path) -> None:
    with_template(QWEN3).save_pretrained(model)
    file = rows(tmp_path / "talk.jsonl", {"text": "fine\x1b[31m"}, "{", {"messages": TALK}, {"question": "b"})
    result = show(file, "--model", model)
    assert result.exit_code == 1
    assert r"f⟦ine\x1b[31m<|im_end|>⟧" in result.output
    assert f"wrong: {file}, line 2: " in result.output
    assert f"wrong: {file}, line 3: message 2 (assistant): the chat template shows the conversation" in result.output
    assert f"wrong: {file}, line 4: the row has the columns question" in result.output
    assert "3 rows can't be trained on" in result.output
    split = show(file, "--model", model, "--on-rewrite", "split").output
    assert f"{file}, line 3, 2 of 2 rows: " in split
    assert "2 rows can't be trained on" in split


def test_the_model_must_be_there(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "empty").mkdir()
    assert "has no tokenizer that can be loaded" in show(file, "--model", tmp_path / "empty").output
    assert "'absent' is not among the models configured here" in show(file, "--model", "absent").output
    assert "data show" in CliRunner().invoke(main, ["data", "show", "--help"]).output
