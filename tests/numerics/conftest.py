"""Numbers are checked in float32 on one thread, on tiny models made on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradserve.compute.catalog import FAMILIES
from tests.models import build_tiny
from tests.numerics.lab import Lab

WINDOW = 24
CONTEXT = 256


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes tens of seconds")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each family by its name, and with a window shorter than the tests' sequences as ``<family>-window``."""
    root = tmp_path_factory.mktemp("models")
    built = {family: build_tiny(root / family, family, context=CONTEXT, tie=family != "qwen3") for family in FAMILIES}
    for family in FAMILIES:
        if family != "llama":
            name = f"{family}-window"
            built[name] = build_tiny(root / name, family, seed=1, context=CONTEXT, window=WINDOW)
    return built


@pytest.fixture
def lab(models: dict[str, Path], tmp_path: Path) -> Lab:
    """An engine and a sampler over all of them, with an object store of its own."""
    return Lab(tmp_path / "objects", models)
