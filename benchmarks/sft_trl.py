"""SFTTrainer against TRL's: loss by processor seconds, on the same conversations in one order, with the same masks.

    python -m benchmarks.sft_trl --trl-python PYTHON --model tiny=DIR --steps 16 --learning-rate 1e-2 \
        --seeds 0 1 2 --out FILE

As rl_trl.py; a step is 8 conversations. The losses of the first step, before any update, have to agree: if they don't,
the libraries train on different tokens and this ends with an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradserve.tracking.statistics import estimate

from .versus import Point, add_runs, arguments, at, reached, trailing

WINDOW = 3
TOLERANCE = 2e-3
"""Of the first losses; TRL prints four digits."""


def compared(ours: list[Point], theirs: list[Point]) -> dict[str, Any]:
    """One seed: loss at equal cost, and the cost of the worse of the two last losses. Means of three steps."""
    if abs(ours[0][1] - theirs[0][1]) > TOLERANCE:
        raise RuntimeError(f"the first losses are {ours[0][1]} and {theirs[0][1]}: not the same tokens")
    mine, other = trailing(ours, WINDOW), trailing(theirs, WINDOW)
    both = min(mine[-1][0], other[-1][0])
    aim = max(mine[-1][1], other[-1][1])
    first, second = (reached(each, aim, rising=False) for each in (mine, other))
    assert first is not None
    assert second is not None
    return {
        "cpu_s_of_a_step": [ours[-1][0] / len(ours), theirs[-1][0] / len(theirs)],
        "loss_after_equal_cpu_s": [both, at(mine, both), at(other, both)],
        "cpu_s_until_loss": [aim, first, second],
        "last_loss": [mine[-1][1], other[-1][1]],
        "step_ratio": theirs[-1][0] / len(theirs) * len(ours) / ours[-1][0],
        "until_loss_ratio": second / first,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each seed, and every ratio (TRL's cost over ours: above 1 is ours) with its 95 % interval over the seeds."""
    seeds = [compared(run["gradserve"]["points"], run["trl"]["points"]) for run in runs]
    names = ("step_ratio", "until_loss_ratio")
    return {"seeds": seeds, "ratios": {name: str(estimate([seed[name] for seed in seeds])) for name in names}}


def main() -> None:
    """Run, print, add to the file."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=64, help="conversations (default: %(default)s)")
    asked = parser.parse_args()
    name, _, folder = asked.model.partition("=")
    settings = {"rows": asked.rows, "steps": asked.steps, "learning_rate": asked.learning_rate}
    add_runs("sft", name, Path(folder), settings, asked, summary)


if __name__ == "__main__":
    main()
