"""gradserve train: a file, its Python and its manifest are the same training."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import gradserve
from gradserve.algorithms.rl import RLTrainer
from gradserve.algorithms.sft import SFTTrainer
from gradserve.cli import main

ROWS = [{"prompt": f"{number}:", "completion": f" {number * 7}"} for number in range(12)]
TASK = """
[task]
trainer = "sft"
model = "tiny"
[data]
train = {{ source = "data.jsonl", split = "[:80%]" }}
eval = {{ source = "data.jsonl", split = "[80%:]" }}
[trainer]
rank = 4
learning_rate = "linear_1e-2"
log_dir = "{log}"
[fit]
epochs = 2
batch_size = 4
[budget]
max_steps = 4
"""


@pytest.fixture
def command(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("GRADSERVE_URL", url)
    return lambda *arguments: CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "task.toml").write_text(TASK.format(log="log"))
    return tmp_path


def logged(log: Path) -> list[dict[str, Any]]:
    """Metrics of all steps and evaluations, without what a clock has to do with."""
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time")} for line in lines]


def test_a_file_its_python_and_its_manifest_give_the_same_losses(command: Callable[..., Result], folder: Path) -> None:
    trained = command("train", folder / "task.toml")
    assert trained.exit_code == 0, trained.output
    assert "a step: 4 rows" in trained.output
    assert "ended at max_steps 4" in trained.output
    assert "step 4, epoch 2: loss" in trained.output
    assert "bill: $0.0" in trained.output
    steps = logged(folder / "log")
    assert [step["step"] for step in steps if "loss" in step] == [1, 2, 3, 4]

    code = command("train", folder / "task.toml", "--as-code", "--log-dir", folder / "as-code")
    assert code.exit_code == 0, code.output
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code.output, "task.py", "exec"), {"__name__": "__main__"})
    assert logged(folder / "as-code") == steps

    again = command("train", folder / "log" / "manifest.json", "--log-dir", folder / "again")
    assert again.exit_code == 0, again.output
    assert logged(folder / "again") == steps


def test_a_folder_in_use_is_gone_on_with_or_left_alone(command: Callable[..., Result], folder: Path) -> None:
    assert command("train", folder / "task.toml", "--set", "budget.max_steps=1").exit_code == 0
    refused = command("train", folder / "task.toml")
    assert refused.exit_code == 2
    assert "has a training already: go on with --resume" in refused.output
    resumed = command("train", folder / "task.toml", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert [step["step"] for step in logged(folder / "log") if "loss" in step] == [1, 2, 3, 4]


def test_what_the_task_gets_wrong_is_one_line(command: Callable[..., Result], folder: Path) -> None:
    refused = command("train", folder / "task.toml", "--set", "trainer.rnk=4")
    assert (refused.exit_code, refused.output.count("\n")) == (1, 1)
    assert "[trainer] has no key 'rnk'; did you mean 'rank'?" in refused.output
    unread = command("train", folder / "task.toml", "--set", 'data.train="gone.jsonl"')
    assert (unread.exit_code, unread.output.count("\n")) == (1, 1)


def long_enough(completion: str) -> float:
    return min(len(completion), 20) / 20


def test_a_manifest_of_python_objects_names_them_or_is_refused(
    command: Callable[..., Result], url: str, folder: Path
) -> None:
    (folder / "reward.py").write_text("def right(completion):\n    return float(len(completion))\n")
    service = gradserve.connect(url)
    settings: dict[str, Any] = {"rank": 4, "group_size": 4, "max_tokens": 4, "service": service}
    with RLTrainer("tiny", long_enough, log_dir=folder / "named", **settings) as trainer:
        trainer.fit(folder / "data.jsonl", batch_size=2, max_steps=2)
    manifest = json.loads((folder / "named/manifest.json").read_text())
    assert manifest["task"] == {"trainer": "rl", "model": "tiny"}
    assert manifest["trainer"]["reward_func"].endswith("test_train_command:long_enough")
    assert manifest["trainer"]["temperature"] == 1.0, "defaults too: another version may have others"
    assert manifest["record"]["unnamed"] == {}
    manifest["trainer"]["reward_func"] = "reward.py:right"
    (folder / "edited.json").write_text(json.dumps(manifest))
    assert command("train", folder / "edited.json", "--as-code").exit_code == 0

    with SFTTrainer("tiny", rank=4, service=service, log_dir=folder / "memory") as supervised:
        supervised.fit(ROWS, max_steps=1, callbacks=[lambda event: None])
    refused = command("train", folder / "memory/manifest.json")
    assert refused.exit_code == 1
    assert "can't be run again" in refused.output
    assert "data.train: rows in memory (list); write them to a file" in refused.output
    assert "callbacks: <function" in refused.output
    named = command("train", folder / "memory/manifest.json", "--set", f"data.train={folder / 'data.jsonl'}")
    assert "data.train" not in named.output


def test_a_manifest_is_refused_when_its_data_has_changed(command: Callable[..., Result], folder: Path) -> None:
    assert command("train", folder / "task.toml", "--set", "budget.max_steps=1").exit_code == 0
    data = folder / "data.jsonl"
    data.write_text(data.read_text().replace(" 77", " 78"))
    changed = command("train", folder / "log/manifest.json", "--log-dir", folder / "changed")
    assert changed.exit_code == 1
    assert "[data] train has other rows than when the manifest was written" in changed.output
