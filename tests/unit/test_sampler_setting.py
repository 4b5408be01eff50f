"""Settings that the vllm sampler can't serve are refused before the server listens."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from gradserve.bootstrap import CannotStart, serve
from gradserve.settings import Settings
from tests.models import build_tiny


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether vLLM seems to be, whatever this environment has."""
    seems = {"vllm": True}
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        if name != "vllm":
            return find(name, package)
        return ModuleSpec(name, None) if seems[name] else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return seems


def refusal(data_dir: Path, models: dict[str, str], **given: Any) -> str:
    settings = Settings(port=0, data_dir=data_dir, models=models, sampler="vllm", **given)
    with pytest.raises(CannotStart) as refused:
        serve(settings, tell=lambda _: None, on_listening=lambda *_: pytest.fail("it listens"))
    return str(refused.value)


def test_vllm_is_not_installed(installed: dict[str, bool], tiny_models: dict[str, str], data_dir: Path) -> None:
    installed["vllm"] = False
    said = refusal(data_dir, {"tiny": tiny_models["tiny"]}, max_lora_rank=32)
    assert "gradserve[vllm]" in said
    assert "GRADSERVE_SAMPLER=builtin" in said


def test_one_model_only(installed: dict[str, bool], tiny_models: dict[str, str], data_dir: Path) -> None:
    said = refusal(data_dir, tiny_models, max_lora_rank=32)
    assert "2 are given: tiny, tiny-qwen" in said


def test_a_family_that_vllm_does_not_run(installed: dict[str, bool], data_dir: Path, tmp_path: Path) -> None:
    model = str(build_tiny(tmp_path / "model", "smollm3"))
    assert "odd is smollm3" in refusal(data_dir, {"odd": model}, max_lora_rank=32)


def test_the_largest_rank(installed: dict[str, bool], tiny_models: dict[str, str], data_dir: Path) -> None:
    """Else a run could train what can't be sampled."""
    assert "64 at most" in refusal(data_dir, {"tiny": tiny_models["tiny"]})
