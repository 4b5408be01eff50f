"""How far the quickstart's reward rises, and how long it trains, over several seeds.

    python -m benchmarks.quickstart --seeds 0 1 2 --out benchmarks/baselines/quickstart.json

Runs ``gradserve quickstart`` as a user does and reads what it prints; ``--logs`` reads outputs that were kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_MEANS = re.compile(r"training ([\d.]+) → ([\d.]+) \(.*?held out ([\d.]+) → ([\d.]+)", re.DOTALL)
_BILL = re.compile(r"bill: \$([\d.]+) = ([\d,]+) trained \+ ([\d,]+) prefilled \+ ([\d,]+) sampled")


def record_of(output: str) -> dict[str, object]:
    """The figures of one run's output. Raises ValueError when it did not finish."""
    means, bill = _MEANS.search(output), _BILL.search(output)
    seconds = re.search(r"trained for (\d+) s", output)
    if means is None or bill is None or seconds is None:
        raise ValueError(f"not the output of a finished quickstart:\n{output[-2000:]}")
    first, last, before, after = map(float, means.groups())
    trained, prefilled, sampled = (int(count.replace(",", "")) for count in bill.groups()[1:])
    return {
        "training_reward": [first, last],
        "held_out_reward": [before, after],
        "rise": round(last - first, 3),
        "held_out_rise": round(after - before, 3),
        "training_s": int(seconds[1]),
        "rewards": [float(value) for value in re.findall(r"step \d+/\d+ · reward ([\d.]+)", output)],
        "tokens": {"trained": trained, "prefilled": prefilled, "sampled": sampled},
        "usd": bill[1],
    }


def _run(seed: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "gradserve",
            "quickstart",
            "--seed",
            str(seed),
            "--plot",
            f"{folder}/curve.png",
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
        return ran.stdout


def main() -> None:
    """Measure or read, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--logs", type=Path, nargs="*", help="outputs of earlier runs, instead of running")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    outputs = [file.read_text() for file in given.logs] if given.logs else [_run(seed) for seed in given.seeds]
    report = {"bench": "quickstart", "runs": [record_of(output) for output in outputs]}
    text = json.dumps(report, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
