"""One gateway per test module: every test makes sessions of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.gateway.gate import Gate, opened


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with opened(tmp_path_factory.mktemp("gate")) as gate:
        yield gate
