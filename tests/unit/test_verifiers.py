"""Rubrics, environments and tasksets of verifiers against its own scoring; of which there are, by its version."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gradserve import rewards
from gradserve.rewards import Failure, Outcome, RewardRunner, RewardUnusable, Sample

RUBRIC = """
import verifiers as vf
from datasets import Dataset

def right(completion, answer, parser):
    return parser.parse_answer(completion) == answer

async def close(completion, answer, info, **kwargs):
    return 1 / (1 + abs(int(completion[-1].content) - int(answer))) * info["scale"]

def brief(prompt, completion, state):
    return float(len(completion[0].content) < len(prompt[-1].content) == len(state["prompt"][-1].content))

def compared(completions):
    return [0.0] * len(completions)

def rubric():
    own = vf.Rubric(funcs=[right], weights=[2.0])
    own.add_metric(brief)
    return vf.RubricGroup([own, vf.Rubric(funcs=[close], weights=[0.5])])

def environment(system_prompt=None):
    rows = Dataset.from_list([
        {"question": "How much is 2 + 2?", "answer": "4", "info": {"scale": 0.5}},
        {"question": "How much is 3 + 4?", "answer": "7", "info": {"scale": 1.0}},
    ])
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric(), system_prompt=system_prompt)

def of_a_group():
    return vf.Rubric(funcs=[compared])

class Own(vf.Rubric):
    async def score_rollout(self, state):
        state["reward"] = 1.0

def of_several_turns():
    return vf.ToolEnv(tools=[], dataset=Dataset.from_list([{"question": "q", "answer": "a"}]), rubric=rubric())

def with_its_own_scoring():
    return Own(funcs=[right])
"""

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace):
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def close(self, task, trace):
        return 1 / (1 + abs(int(trace.last_reply) - int(task.answer)))

    @vf.metric
    async def turns(self, trace):
        return len(trace.assistant_messages)

class Config(vf.TasksetConfig):
    system_prompt_text: str | None = None

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for a, b in ((2, 2), (3, 4)):
            data = Data(prompt=f"{a} + {b}", answer=str(a + b), system_prompt=self.config.system_prompt_text)
            yield Sum(data, self.config.task)

def taskset(**fields):
    return Sums(Config(**fields))

class Sandboxed(vf.Task[Data]):
    @vf.reward
    async def ran(self, trace, runtime):
        return 1.0

def sandboxed():
    class Boxes(vf.Taskset[Sandboxed, Config]):
        def load(self):
            yield Sandboxed(Data(prompt="run it", answer=""), self.config.task)
    return Boxes(Config())

class Prepared(Sum):
    async def setup(self, trace, runtime):
        pass

def prepared():
    class Preparations(vf.Taskset[Prepared, Config]):
        def load(self):
            yield Prepared(Data(prompt="p", answer=""), self.config.task)
    return Preparations(Config())
"""


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


rubrics = pytest.mark.skipif(not has("verifiers.rubrics.rubric"), reason="no verifiers with rubrics (before 0.4)")
tasksets = pytest.mark.skipif(
    not has("verifiers.v1") or has("verifiers.rubrics.rubric"), reason="no verifiers with tasksets (0.4)"
)


@pytest.fixture
def rubric_file(tmp_path: Path) -> str:
    (tmp_path / "rubrics.py").write_text(RUBRIC)
    return str(tmp_path / "rubrics.py")


@pytest.fixture
def taskset_file(tmp_path: Path) -> str:
    (tmp_path / "sums.py").write_text(TASKSET)
    return str(tmp_path / "sums.py")


def stored(source: str, arguments: dict[str, Any] | None = None, **settings: Any) -> list[dict[str, Any]]:
    """Rows as they come back from a file."""
    rows: list[dict[str, Any]] = json.loads(json.dumps(rewards.verifiers_rows(source, arguments, **settings)))
    return rows


def score(source: str, samples: list[Sample]) -> list[Outcome | Failure]:
    with RewardRunner(rewards.verifiers(source), timeout_s=60, retries=0) as runner:
        return runner.score(samples)


@rubrics
def test_a_rubric_earns_in_another_process_what_verifiers_gives(rubric_file: str) -> None:
    from verifiers.types import State
    from verifiers.utils.message_utils import normalize_messages

    from gradserve.rewards.naming import Reference, resolve

    source = f"{rubric_file}:environment"
    made: Any = resolve(Reference(source, {}))
    rows = stored(source)
    pairs = [(row, text) for row in rows for text in ("4", "7", "12")]
    results = score(source, [Sample(completion=text, **row) for row, text in pairs])
    for (row, text), result in zip(pairs, results, strict=True):
        state = State(input={**row["state"], "prompt": normalize_messages(row["prompt"]), "answer": row["answer"]})
        state["completion"] = normalize_messages([{"role": "assistant", "content": text}])
        state["trajectory"] = [{"completion": state["completion"]}]  # of a single turn
        asyncio.run(made.rubric.score_rollout(state))
        assert isinstance(result, Outcome), result
        assert (result.value, dict(result.parts)) == (state["reward"], state["metrics"])
    # By hand: 2 · right + 0 · brief + 0.5 · scale / (1 + |7 - 4|).
    assert [result.value for result in results[:2] if isinstance(result, Outcome)] == [2.25, 0.0625]


@rubrics
def test_an_environments_rows(rubric_file: str) -> None:
    rows = stored(f"{rubric_file}:environment", {"system_prompt": "Only the number."}, size=1)
    assert [(row["prompt"], row["answer"], row["state"]["info"]) for row in rows] == [
        (
            [
                {"role": "system", "content": "Only the number."},
                {"role": "user", "content": "How much is 2 + 2?"},
            ],
            "4",
            {"scale": 0.5},
        )
    ]
    with pytest.raises(ValueError, match="no dataset for evaluation"):
        rewards.verifiers_rows(f"{rubric_file}:environment", evaluation=True)
    with pytest.raises(ValueError, match="has no dataset"):
        rewards.verifiers_rows(f"{rubric_file}:rubric")


@rubrics
def test_a_reward_function_that_raises_is_a_failure_and_not_verifiers_zero(rubric_file: str) -> None:
    [row, _] = stored(f"{rubric_file}:environment")
    [result] = score(f"{rubric_file}:rubric", [Sample(completion="four", **row)])
    assert isinstance(result, Failure)
    assert "invalid literal for int()" in result.detail


@rubrics
def test_rubrics_that_need_more_than_one_completion_are_refused(rubric_file: str) -> None:
    with pytest.raises(RewardUnusable, match="compared compares a group"):
        rewards.verifiers(f"{rubric_file}:of_a_group")
    with pytest.raises(RewardUnusable, match="Own has a scoring of its own"):
        rewards.verifiers(f"{rubric_file}:with_its_own_scoring")
    with pytest.raises(RewardUnusable, match="ToolEnv is not of a single turn"):
        rewards.verifiers(f"{rubric_file}:of_several_turns")


@tasksets
def test_a_taskset_earns_in_another_process_what_its_task_scores(taskset_file: str) -> None:
    source = f"{taskset_file}:taskset"
    rows = stored(source)
    assert [(row["prompt"], row["answer"]) for row in rows] == [
        ([{"role": "user", "content": "2 + 2"}], "4"),
        ([{"role": "user", "content": "3 + 4"}], "7"),
    ]
    samples = [Sample(completion=text, **row) for row in rows for text in (" 4\n", "7", "no number")]
    results = score(source, samples)
    # By hand: 2 · right + 0.5 / (1 + |difference|); the metric doesn't count.
    assert results[0] == Outcome(2.5, {"turns": 1.0, "right": 1.0, "close": 1.0})
    assert results[1] == Outcome(0.125, {"turns": 1.0, "right": 0.0, "close": 0.25})
    assert results[4] == Outcome(2.5, {"turns": 1.0, "right": 1.0, "close": 1.0})
    assert [isinstance(result, Failure) for result in results] == [False, False, True] * 2


@rubrics
def test_an_installed_environment_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_sums.py").write_text(RUBRIC.replace("def environment", "def load_environment"))
    monkeypatch.syspath_prepend(tmp_path)
    [row] = stored("some-sums", size=1)
    assert asyncio.run(rewards.verifiers("some-sums")(completion="4", **row))["total"] == 2.25


@tasksets
def test_an_installed_taskset_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_sums.py").write_text(f"__all__ = ['Sums']\n{TASKSET}")
    monkeypatch.syspath_prepend(tmp_path)
    [row] = stored("some-sums", {"system_prompt_text": "Only the number."}, size=1)
    assert row["prompt"][0] == {"role": "system", "content": "Only the number."}
    assert asyncio.run(rewards.verifiers("some-sums")(row["prompt"], "4", row["state"]))["total"] == 2.5


@tasksets
def test_a_tasksets_settings_and_weights_are_honoured(taskset_file: str) -> None:
    arguments = {"system_prompt_text": "Only the number.", "task": {"rewards": {"close": {"weight": 3.0}}}}
    [row] = stored(f"{taskset_file}:taskset", arguments, size=1)
    assert row["prompt"][0] == {"role": "system", "content": "Only the number."}
    reward = rewards.verifiers(f"{taskset_file}:taskset", arguments)
    found = asyncio.run(reward(row["prompt"], "7", row["state"]))
    assert found == {"turns": 1.0, "right": 0.0, "close": 0.25, "total": 0.75}


@tasksets
def test_tasks_that_need_more_than_one_completion_are_refused(taskset_file: str) -> None:
    with pytest.raises(RewardUnusable, match="has its own setup"):
        rewards.verifiers(f"{taskset_file}:prepared")
    [row] = stored(f"{taskset_file}:sandboxed")
    with pytest.raises(RewardUnusable, match="ran of Sandboxed wants a sandbox"):
        asyncio.run(rewards.verifiers(f"{taskset_file}:sandboxed")(row["prompt"], "x", row["state"]))
    with pytest.raises(RewardUnusable, match="a Data was made"):
        rewards.verifiers(f"{taskset_file}:Data", {"answer": ""})
    with pytest.raises(ValueError, match="no rows for evaluation"):
        rewards.verifiers_rows(f"{taskset_file}:taskset", evaluation=True)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    for call in (rewards.verifiers, rewards.verifiers_rows):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'gradserve\[verifiers\]'"):
            call("gsm8k")
