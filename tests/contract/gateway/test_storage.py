"""What a run keeps on disk and what that costs, by hand."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from gradserve.cli.checkpoints import _stored
from gradserve.store.base import Version
from tests.contract.gateway.gate import opened


def test_each_object_of_a_run_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserve.gateway.routes.versions.weight_norms", lambda _: {})  # they are no arrays here
    prices = {"default": {"storage_gib_month": "0.5"}}
    with opened(tmp_path, prices=prices) as gate:
        run = gate.run()
        saved = gate.save(run, 1, "a")
        gate.save(run, 2, "b", "sampler_weights")  # the same weights
        moments = gate.objects.put(b"0123456789")
        version = Version(run, "local", 0, 3, saved.weights, moments, "age", 999, 0.0)
        gate.on_loop(lambda: gate.store.put_version(version))
        other = gate.run(number=1)
        gate.save(other, 1, "a")

        size = len(f"weights of {run}") + 10
        for route in ("versions", "summary"):
            stored = gate.get(f"gradserve/runs/{run}/{route}").json()["stored"]
            assert (stored["objects"], stored["bytes"], stored["usd_per_gib_month"]) == (2, size, "0.5")
            # 2^-31 a byte
            assert Decimal(stored["usd_per_month"]) == size * Decimal("0.0000000004656612873077392578125")


def test_the_cost_is_shown() -> None:
    stored = {"objects": 2, "bytes": 3 << 29, "usd_per_gib_month": "0.1", "usd_per_month": "0.15"}
    assert _stored(stored) == "1,536.0 MiB stored, $0.15 a month at $0.1 per GiB (not billed)"
