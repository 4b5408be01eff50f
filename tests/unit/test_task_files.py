"""What a task file may say: the trainers' own keywords, checked before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradserve.algorithms.rl import RLTrainer
from gradserve.algorithms.sft import SFTTrainer
from gradserve.algorithms.stopping import EarlyStop
from gradserve.algorithms.tasks.keywords import constructor_keywords, fits
from gradserve.algorithms.tasks.plan import Plan
from gradserve.algorithms.tasks.task import Task, load, task_of
from gradserve.algorithms.tasks.templates import TEMPLATES, write_project
from gradserve.algorithms.tasks.trainers import TaskError
from gradserve.data.dataset import Dataset

HEAD: dict[str, Any] = {"task": {"trainer": "sft", "model": "tiny"}, "data": {"train": "data.jsonl"}}
RL: dict[str, Any] = {"task": {"trainer": "rl", "model": "tiny"}, "data": {"train": "data.jsonl"}}


def task(folder: Path = Path("/work"), **tables: Any) -> Task:
    return task_of({**HEAD, **tables}, folder)


def test_tables_become_the_keywords_of_constructor_and_fit(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text(
        """
        task = { trainer = "sft", model = "tiny" }
        data.train = { source = "data.jsonl", split = "[:90%]" }
        data.eval = "s3://bucket/held-out.jsonl"
        trainer = { learning_rate = "linear_1e-3", log_dir = "log", grad_clip_norm = 1 }
        fit = { epochs = 2, checkpoint_every = "none" }
        budget.max_steps = 7
        early_stop = { metric = "eval/loss", mode = "min" }
        """
    )
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    found = load(tmp_path / "task.toml", ["trainer.rank=4", "fit.epochs=3", "task.model=other"])
    assert found.trainer is SFTTrainer
    log_dir = str(tmp_path / "log")
    assert found.constructor.keywords == {
        "model": "other", "learning_rate": "linear_1e-3", "log_dir": log_dir, "grad_clip_norm": 1, "rank": 4
    }  # fmt: skip
    train, stop = found.fit["train_data"], found.fit["early_stop"]
    assert isinstance(train(), Dataset)
    assert train.keywords == {"source": str(tmp_path / "data.jsonl"), "split": "[:90%]", "shuffle_seed": 0}
    assert stop() == EarlyStop("eval/loss", mode="min")
    rest = {name: value for name, value in found.fit.items() if name not in ("train_data", "early_stop")}
    assert rest == {
        "eval_data": "s3://bucket/held-out.jsonl", "epochs": 3, "checkpoint_every": None, "max_steps": 7
    }  # fmt: skip
    assert (found.told("rank"), found.told("batch_size"), found.told("seed")) == (4, 8, 0)


def test_files_are_found_from_anywhere() -> None:
    config = {"environment": "game.py:Guess", "arguments": {"hint": "a.py:b is a hint"}}
    rl = task_of({**RL, "trainer": {"reward_func": "reward.py:right", "env_config": config}}, Path("/work"))
    assert rl.constructor.keywords["reward_func"] == "/work/reward.py:right"
    assert rl.constructor.keywords["env_config"] == {**config, "environment": "/work/game.py:Guess"}
    assert rl.fit["train_data"] == "/work/data.jsonl"
    of_a_module = task_of({**RL, "trainer": {"reward_func": "package.rewards:right"}}, Path("/work"))
    assert of_a_module.constructor.keywords["reward_func"] == "package.rewards:right"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"trainer": {"learning_rat": 1}}, r"\[trainer\] has no key 'learning_rat'; did you mean 'learning_rate'"),
        ({"trainer": {"rank": "4"}}, r"\[trainer\] rank is '4'; give a whole number"),
        ({"trainer": {"rank": True}}, r"\[trainer\] rank is True; give a whole number"),
        ({"trainer": {"train": "asistant"}}, r"give one of 'assistant', 'last'"),
        ({"trainer": {"group_size": 4}}, r"\[trainer\] has no key 'group_size'"),
        ({"trainer": {"service": "here"}}, r"\[trainer\] has no key 'service'"),
        ({"fit": {"resume": True}}, r"\[fit\] has no key 'resume'"),
        ({"fit": {"max_steps": 4}}, r"\[fit\] has no key 'max_steps'"),
        ({"budgt": {}}, r"no table \[budgt\] for trainer 'sft'; did you mean 'budget'"),
        ({"early_stop": {"patience": 2}}, r"\[early_stop\] metric is missing: a text"),
        ({"data": {}}, r"\[data\] train is missing"),
        ({"data": {"train": {"split": "[:9%]"}}}, r"\[data.train\] source is missing"),
        ({"data": {"train": {"source": "a", "formt": "csv"}}}, r"\[data.train\] .* 'formt'; did you mean 'format'"),
        ({"task": {"trainer": "sft"}}, r"\[task\] model is missing"),
        ({"task": {"trainer": "stf", "model": "tiny"}}, r"trainer is 'stf'; did you mean 'sft'"),
        ({"task": {"model": "tiny"}}, r"\[task\] trainer is missing; give one of rl, sft"),
        ({"task": {"trainer": "gradserve.nowhere:Trainer"}}, r"gradserve.nowhere can't be used"),
        ({"model": "tiny"}, r"model stands outside of a table"),
    ],
)
def test_what_does_not_fit_is_refused_by_table_and_key(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        task(**tables)


def test_a_control_task_has_neither_model_nor_data() -> None:
    head = {"task": {"trainer": "ppo"}, "trainer": {"env_config": {"id": "CartPole-v1"}, "gae_lambda": 0.9}}
    found = task_of({**head, "fit": {"max_epochs": 3}}, Path("/work"))
    assert (found.starts_with, found.fit) == ("train", {"max_epochs": 3})
    with pytest.raises(TaskError, match=r"no table \[data\]"):
        task_of({**head, "data": {"train": "a"}}, Path("/work"))
    with pytest.raises(TaskError, match=r"has no key 'steps'"):
        task_of({**head, "trainer": {"steps": 3}}, Path("/work"))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[task\n")
    with pytest.raises(TaskError, match=r"broken.toml can't be read: .*line 1"):
        load(broken)
    broken.write_text("[task]\ntrainer = 'sft'\n")
    with pytest.raises(TaskError, match=r"--set rank=3: write table\.key=value"):
        load(broken, ["rank=3"])
    with pytest.raises(TaskError, match=r"broken.toml: \[task\] model is missing"):
        load(broken)


def test_kinds_of_values() -> None:
    kinds = {name: keyword.kind for name, keyword in constructor_keywords(RLTrainer).items()}
    assert fits(1, kinds["learning_rate"])
    assert fits("linear_1e-3", kinds["learning_rate"])
    assert not fits([1], kinds["learning_rate"])
    assert fits({"clip_low_threshold": 1}, kinds["loss_config"])
    assert not fits({"clip_low_threshold": "1"}, kinds["loss_config"])
    assert fits(["wandb"], kinds["sinks"])
    assert not fits([1], kinds["sinks"])


def test_derived_numbers() -> None:
    plan = Plan(rows=99, batch_size=8, epochs=2, max_steps=None, group_size=4, max_tokens=16)
    assert (plan.steps_per_epoch, plan.steps, plan.episodes_per_step) == (13, 26, 32)
    assert "8 rows x group_size 4 = 32 episodes, at most 512 sampled tokens" in plan.lines()[0]
    assert Plan(rows=99, batch_size=8, epochs=2, max_steps=20).steps == 20
    assert Plan(rows=None, batch_size=8, epochs=2, max_steps=20).steps == 20


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_is_a_task_with_data_that_is_read(template: str, tmp_path: Path) -> None:
    folder = tmp_path / template
    files = write_project(template, folder)
    # Of distillation the teacher is trained first, and then named.
    named = {"distill": ["trainer.teacher=tinker://run/weights/last"]}.get(template, [])
    tasks = [load(folder / name, named if name == "task.toml" else []) for name in files if name.endswith(".toml")]
    assert tasks
    for found in tasks:
        compile(found.code(), "task.py", "exec")
        rows = [path for name in ("train_data", "eval_data") if isinstance(path := found.fit.get(name), str)]
        assert all(len(list(Dataset(path))) > 10 for path in rows)
    with pytest.raises(TaskError, match="is not empty"):
        write_project(template, folder)


def test_a_held_out_row_of_a_template_is_never_trained_on(tmp_path: Path) -> None:
    write_project("math-rl", tmp_path / "p")
    rows = {
        name: {json.loads(line)["prompt"] for line in (tmp_path / "p" / name).read_text().splitlines()}
        for name in ("data.jsonl", "held-out.jsonl")
    }
    assert not rows["data.jsonl"] & rows["held-out.jsonl"]
