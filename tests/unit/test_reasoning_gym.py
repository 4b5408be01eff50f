"""reasoning-gym's tasks and rewards against the package's own generators and scorers."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from gradserve import rewards
from gradserve.rewards import Outcome, RewardRunner, Sample
from gradserve.rewards.ready.reasoning_gym_adapter import _from_json, _to_json

gym = pytest.importorskip("reasoning_gym")

ONE_OF_EACH_KIND = (
    "leg_counting",
    "arc_agi",
    "decimal_arithmetic",
    "polynomial_equations",
    "word_ladder",
    "rubiks_cube",
)
"""An exact answer; tuples in the metadata; scorers that use the configuration; a word list; many right answers."""


def stored(name: str, size: int, seed: int, **config: Any) -> list[dict[str, Any]]:
    """Rows as they come back from a file."""
    rows: list[dict[str, Any]] = json.loads(json.dumps(rewards.reasoning_gym_rows(name, size, seed, **config)))
    return rows


def values(row: dict[str, Any], completions: list[str], **settings: Any) -> list[float]:
    """In this process, which has imported the package already."""
    reward = rewards.reasoning_gym(**settings)
    return [reward(completion=text, **row) for text in completions]


def test_the_rows_are_the_tasks_of_the_package() -> None:
    dataset = gym.create_dataset("leg_counting", size=4, seed=7, max_animals=4)
    rows = rewards.reasoning_gym_rows("leg_counting", 4, 7, max_animals=4)
    assert [(row["prompt"], row["answer"]) for row in rows] == [(e["question"], e["answer"]) for e in dataset]
    assert rows == rewards.reasoning_gym_rows("leg_counting", 4, 7, max_animals=4)
    assert rows != rewards.reasoning_gym_rows("leg_counting", 4, 8, max_animals=4)


def test_stored_rows_of_several_datasets_earn_in_another_process_what_the_packages_scorers_give() -> None:
    rows, completions, expected = [], [], []
    for name in ONE_OF_EACH_KIND:
        dataset = gym.create_dataset(name, size=2, seed=3)
        for entry, row in zip(dataset, stored(name, 2, 3), strict=True):
            answers = [entry["answer"] or "F R2 U'", "12", f"{entry['answer']} or so"]
            rows += [row] * len(answers)
            completions += [f"<think>1</think><answer>0</answer> no: <answer>{answer}</answer>" for answer in answers]
            expected += [dataset.score_answer(answer.strip(), entry) for answer in answers]
    samples = [Sample(completion=text, **row) for row, text in zip(rows, completions, strict=True)]
    with RewardRunner(rewards.reasoning_gym(), timeout_s=60, retries=0) as runner:
        earned = [result.value for result in runner.score(samples) if isinstance(result, Outcome)]
    assert earned == expected
    assert 1.0 in earned
    assert any(0 < value < 1 for value in earned)


def test_the_scorer_has_the_configuration_of_the_row() -> None:
    places = {"min_num_decimal_places": 1, "max_num_decimal_places": 1}
    [row] = stored("decimal_arithmetic", 1, 5, **places)
    near = str(float(row["answer"]) + 0.04)  # within a unit of the last of one place, not of the default's six
    entry = {"question": row["prompt"], "answer": row["answer"], "metadata": {}}
    assert gym.get_score_answer_fn("decimal_arithmetic")(near, entry) == 0
    assert gym.create_dataset("decimal_arithmetic", **places).score_answer(near, entry) == 1
    assert values(row, [near], tag=None) == [1]


def test_the_answer_is_what_stands_in_the_tag() -> None:
    [row] = stored("leg_counting", 1, 0)
    right = row["answer"]
    assert values(row, [f"<answer> {right}\n</answer>", right, f"<final>{right}</final>"]) == [1, 0, 0]
    assert values(row, [f"<answer>{right}</answer>", f"<final>{right}</final>"], tag="final") == [0, 1]
    assert values(row, [f" {right}\n"], tag=None) == [1]


def test_what_is_no_task_of_the_dataset_raises_and_earns_no_zero() -> None:
    [other] = stored("chain_sum", 1, 0)
    reward = rewards.reasoning_gym("leg_counting")
    with pytest.raises(ValueError, match="the row is of chain_sum"):
        reward(completion="<answer>1</answer>", **other)
    with pytest.raises(ValueError, match="by reasoning_gym_rows"):
        reward("2 + 2", "<answer>4</answer>", "4", None)


def test_unknown_datasets_and_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="no dataset 'leg_count'"):
        rewards.reasoning_gym("leg_count")
    with pytest.raises(ValueError, match="no dataset 'leg_count'"):
        rewards.reasoning_gym_rows("leg_count", 1, 0)
    with pytest.raises(TypeError, match="max_legs"):
        rewards.reasoning_gym_rows("leg_counting", 1, 0, max_legs=3)
    with pytest.raises(ValueError, match="at least 1"):
        rewards.reasoning_gym_rows("leg_counting", 0, 0)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("reasoning_gym", "reasoning_gym.utils"):
        monkeypatch.setitem(sys.modules, module, None)
    for call in (rewards.reasoning_gym, lambda: rewards.reasoning_gym_rows("leg_counting", 1, 0)):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'gradserve\[reasoning-gym\]'"):
            call()


def test_metadata_is_the_same_after_json() -> None:
    metadata = {"a": (1, [2.5, None]), "b": {1: "x", (2, 3): True}, "c": {"$tuple": "a key of that name"}, "d": {}}
    assert _from_json(json.loads(json.dumps(_to_json(metadata)))) == metadata
    with pytest.raises(TypeError, match="set"):
        _to_json({"s": {1}})
