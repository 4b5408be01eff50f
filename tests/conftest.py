"""Fixtures that several kinds of test share: tiny models made on the spot, and a real server on a free port."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradserve.client.embedded import EmbeddedServer

os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests run side by side: one thread each is faster than several that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRADSERVE_WORKER_THREADS", "1")
for name in ("GRADSERVE_URL", "TINKER_BASE_URL", "TINKER_API_KEY"):
    os.environ.pop(name, None)

VOCABULARY = 320
CONTEXT = 512


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two random models of different families, by name."""
    from tests.models import build_tiny

    root = tmp_path_factory.mktemp("models")
    return {
        "tiny": str(build_tiny(root / "tiny", family="llama", seed=1, vocab_size=VOCABULARY, context=CONTEXT)),
        "tiny-qwen": str(build_tiny(root / "qwen", family="qwen3", seed=2, vocab_size=VOCABULARY, context=CONTEXT)),
    }


@pytest.fixture(scope="session")
def server(tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One server for the tests that leave it as it was (each makes its own session and runs)."""
    running = EmbeddedServer(tiny_models, tmp_path_factory.mktemp("data"))
    yield running
    running.stop()


@pytest.fixture
def url(server: EmbeddedServer) -> str:
    """Where the shared server listens."""
    return server.url


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory of one's own."""
    return tmp_path / "data"
