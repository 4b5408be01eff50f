"""The projects that ``gradserve init`` writes: the files below templates, and data made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from gradserve.algorithms.addition import Addition, problems
from gradserve.algorithms.tasks.trainers import TaskError

Rows = Iterable[Mapping[str, Any]]


def _sums_to_answer() -> dict[str, Rows]:
    train, held_out = problems()
    return {"data.jsonl": map(_sum_to_answer, train), "held-out.jsonl": map(_sum_to_answer, held_out)}


def _sum_to_answer(problem: Addition) -> dict[str, Any]:
    return {"prompt": problem.question, "answer": _total(problem)}


def _answered_sums() -> dict[str, Rows]:
    train, _ = problems()
    return {"data.jsonl": ({"messages": _conversation(problem)} for problem in train)}


def _preferred_sums() -> dict[str, Rows]:
    train, _ = problems()
    return {"data.jsonl": map(_preferred_sum, train)}


def _preferred_sum(problem: Addition) -> dict[str, Any]:
    """A short answer is chosen before one that is as right and goes on."""
    question, answer = _conversation(problem)
    longer = f"To find the sum, we add the two numbers: {answer['content']}. Would you like to see another example?"
    return {"prompt": [question], "chosen": answer["content"], "rejected": longer}


def _teacher_and_prompts() -> dict[str, Rows]:
    train, held_out = problems()
    asked = {"prompts.jsonl": train, "held-out.jsonl": held_out}
    return {
        "answers.jsonl": ({"messages": _conversation(problem)} for problem in train),
        **{name: ({"prompt": [_conversation(problem)[0]]} for problem in some) for name, some in asked.items()},
    }


def _conversation(problem: Addition) -> list[dict[str, str]]:
    said = f"{problem.left} + {problem.right} = {_total(problem)}"
    return [{"role": "user", "content": problem.question}, {"role": "assistant", "content": said}]


def _total(problem: Addition) -> str:
    return str(problem.left + problem.right)


TEMPLATES: Mapping[str, Callable[[], dict[str, Rows]]] = {
    "math-rl": _sums_to_answer,
    "sft": _answered_sums,
    "dpo": _preferred_sums,
    "distill": _teacher_and_prompts,
    "robot": dict,
}
"""By name, what makes the data files of each."""


def write_project(template: str, folder: Path) -> list[str]:
    """Write the project into ``folder``; the names of its files. Raises TaskError when there is something already."""
    if folder.exists() and any(folder.iterdir()):
        raise TaskError(f"{folder} is not empty: give another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        file.name: file.read_text(encoding="utf-8")
        for file in resources.files("gradserve.algorithms.tasks").joinpath("templates", template).iterdir()
        if file.is_file()
    }
    for name, rows in TEMPLATES[template]().items():
        written[name] = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(written)
