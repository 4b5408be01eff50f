"""Every test here may use the toy environments."""

from __future__ import annotations

import pytest

pytest.importorskip("gymnasium")

from tests.numerics.control import toys


@pytest.fixture(autouse=True, scope="session")
def known_toys() -> None:
    """Registers them."""
    toys.register()
