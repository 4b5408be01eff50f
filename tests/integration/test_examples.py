"""The visible loops in examples/, on a tiny random model: each runs, stays short, and moves what it should move."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The ``main`` of an example, on the shared server."""
    monkeypatch.setenv("GRADSERVE_URL", url)
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def told(capsys: pytest.CaptureFixture[str]) -> list[float]:
    """The last number of each step's line, in order."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    return [float(line.removesuffix(" per token").split()[-1]) for line in lines]


def test_sft(example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    last = example("sft")("tiny", 8)
    losses = told(capsys)
    assert last < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_rewards_are_counted(name: str, example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    example(name)("tiny", 3)
    assert all(0 <= reward <= 1 for reward in told(capsys))


def test_dpo(example: Callable[[str], Any]) -> None:
    assert example("dpo")("tiny", 4) == 1.0


def test_distillation(example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    example("distill")("tiny", "tiny-qwen", 10)
    apart = told(capsys)
    assert sum(apart[-3:]) < sum(apart[:3])


def test_each_is_under_60_lines() -> None:
    lengths = {file.name: len(file.read_text().splitlines()) for file in EXAMPLES.glob("*.py")}
    assert {"grpo.py", "ppo.py", "sft.py", "dpo.py", "distill.py"} <= lengths.keys()
    assert max(lengths.values()) < 60, lengths
