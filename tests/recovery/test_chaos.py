"""A dozen kills at seeded moments; `make chaos` makes a hundred. What must be zero is zero."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.chaos import differences, storm


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("at_once", "seed", "steps"), [(False, 1, 9), (True, 2, 5)], ids=["in turn", "at once"])
def test_a_storm_changes_nothing(
    tiny_models: dict[str, str], tmp_path: Path, at_once: bool, seed: int, steps: int
) -> None:
    """In turn in the default mode; two runs at once in batch_invariant mode."""
    played = storm({"tiny": tiny_models["tiny"]}, tmp_path, steps, seed, 0.2, at_once)
    assert len(played["injections"]) >= 4, played["injections"]
    assert not any(differences(played).values()), differences(played)
    assert all(state["version"] == steps for state in played["found"].values())
