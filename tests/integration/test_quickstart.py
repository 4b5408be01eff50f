"""The first thing that anybody runs, cut to two steps. How far the reward rises is for benchmarks/quickstart.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_quickstart_from_nothing_to_a_bill(tmp_path: Path) -> None:
    plot = tmp_path / "curve.png"
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "COLUMNS": "100"}
    command = [sys.executable, "-m", "gradserve", "quickstart", "--steps", "2", "--plot", str(plot)]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "step 2/2 · reward" in ran.stdout
    assert "Sample answers" in ran.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    folder = re.search(r"checkpoint: tinker://\S+/weights/quickstart\s+(\S+)", ran.stdout)
    assert folder is not None
    assert {file.name for file in Path(folder[1]).iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.safetensors",
    }
    bill = re.search(r"bill: \$(\d+\.\d+) =", ran.stdout)
    assert bill is not None
    assert float(bill[1]) > 0
    run_id = re.search(r"run (\S+:train:0)", ran.stdout)
    assert run_id is not None
    again = [sys.executable, "-m", "gradserve", "run", run_id[1]]
    shown = subprocess.run(again, capture_output=True, text=True, env=environment, check=True).stdout
    assert f"${bill[1]}" in shown
