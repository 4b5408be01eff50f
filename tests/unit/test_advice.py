"""Advice by method and size, and the warnings of a task that will not go well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gradserve.algorithms.advice import advised, parameters_in
from gradserve.algorithms.tasks.plan import Plan
from gradserve.algorithms.tasks.review import Model, compared, warnings
from gradserve.algorithms.tasks.task import Task, load, task_of
from gradserve.algorithms.tasks.templates import TEMPLATES, write_project
from gradserve.algorithms.tasks.training import ready
from gradserve.cli import main

SMALL = Model("smollm2-135m-instruct", 135_000_000, context=100)


def rate(trainer: str, parameters: int | None, mode: str | None = None) -> float:
    return {advice.keyword: advice.value for advice in advised(trainer, parameters, mode)}["learning_rate"]


def test_sizes_in_names() -> None:
    assert parameters_in("meta-llama/Llama-3.1-8B-Instruct") == 8_000_000_000
    assert parameters_in("Qwen/Qwen3-30B-A3B") == 30_000_000_000
    assert parameters_in("gpt2-medium") is None


def test_learning_rates_by_method_and_size() -> None:
    assert (rate("sft", 135_000_000), rate("sft", 70_000_000_000)) == (1e-3, 3e-4)
    assert (rate("rl", 100_000_000), rate("rl", 8_000_000_000), rate("rl", 70_000_000_000)) == (5e-4, 4e-5, 4e-5)
    assert 4e-5 < rate("rl", 1_000_000_000) < 5e-4, "between the two sizes that were measured"
    assert rate("dpo", 8_000_000_000) < rate("sft", 8_000_000_000) / 10
    assert rate("distill", None, "off_policy") == rate("sft", None) > rate("distill", None, "on_policy")
    assert not advised("ppo", None)
    assert all(advice.source for trainer in ("sft", "rl", "dpo", "reward") for advice in advised(trainer, None))


def rl(**tables: Any) -> Task:
    return task_of(
        {
            "task": {"trainer": "rl", "model": "smollm2-135m-instruct"},
            "data": {"train": "train.jsonl", "eval": "held-out.jsonl"},
            "trainer": {"reward_func": "reward.py:right", "learning_rate": 5e-4, "max_tokens": 16}
            | tables.pop("trainer", {}),
            **tables,
        },
        Path("/work"),
    )


GOOD = Plan(rows=400, batch_size=8, epochs=1, max_steps=None, group_size=8, max_tokens=16)


def test_a_good_task_has_no_warnings() -> None:
    assert list(warnings(rl(), SMALL, GOOD)) == []


@pytest.mark.parametrize(
    ("tables", "plan", "said"),
    [
        ({"trainer": {"learning_rate": 1e-6}}, GOOD, "learning_rate is 1e-06, and 0.0005 is advised"),
        ({"trainer": {"learning_rate": "linear_1e-6"}}, GOOD, "learning_rate is linear_1e-6"),
        ({"trainer": {"group_size": 2}}, GOOD, "group_size is 2, and 8 is advised"),
        ({"trainer": {"max_tokens": 100}}, GOOD, "max_tokens is 100 and the context of .* is 100 tokens"),
        ({"trainer": {"temperature": 0}}, GOOD, "all answers to a prompt are the same"),
        ({"data": {"train": "train.jsonl"}}, GOOD, "eval is missing"),
        ({"data": {"train": "all.jsonl", "eval": "all.jsonl"}}, GOOD, "eval reads rows that are trained on"),
        ({}, Plan(400, 2, 1, None, 8, 16), "16 episodes: so few say little; raise batch_size or group_size"),
        ({}, Plan(40, 8, 1, None, 8, 16), "only 5 optimizer steps"),
        ({}, Plan(4, 8, 20, None, 8, 16), "4 rows and batch_size is 8"),
    ],
)
def test_what_is_warned_of(tables: dict[str, Any], plan: Plan, said: str) -> None:
    (warning,) = warnings(rl(**tables), SMALL, plan)
    assert re.search(said, warning)


def test_two_splits_of_a_source_do_not_overlap() -> None:
    split = {"train": {"source": "a.jsonl", "split": "[:90%]"}, "eval": {"source": "a.jsonl", "split": "[90%:]"}}
    assert list(warnings(rl(data=split), SMALL, GOOD)) == []


def test_what_is_set_and_what_is_default() -> None:
    found = {each.advice.keyword: each for each in compared(rl(), SMALL)}
    assert (found["learning_rate"].value, found["learning_rate"].is_set) == (5e-4, True)
    assert (found["group_size"].value, found["group_size"].is_set) == (8, False)


@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"robot", "distill"}))
def test_templates_follow_the_advice(template: str, tmp_path: Path) -> None:
    write_project(template, tmp_path / "p")
    task = load(tmp_path / "p/task.toml")
    assert list(warnings(task, SMALL, ready(task).plan)) == []


def test_the_command_says_sources_and_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project("sft", tmp_path / "p")
    task = ["advise", str(tmp_path / "p/task.toml"), "--set", "task.model=unknown-1b"]
    monkeypatch.setenv("GRADSERVE_DATA_DIR", str(tmp_path / "data"))
    found = CliRunner().invoke(main, [*task, "--set", "trainer.learning_rate=1"])
    assert found.exit_code == 0, found.output
    assert "unknown-1b (1,000 million parameters)" in found.output
    assert "learning_rate: 1 in the file; advised 0.001" in found.output
    assert "hyperparam_utils.get_lr" in found.output
    assert "warning: learning_rate is 1" in found.output
    assert "nothing looks wrong" in CliRunner().invoke(main, task).output
