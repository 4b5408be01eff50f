"""GRPO by RLTrainer against TRL's GRPOTrainer: reward by processor seconds, equal model, adapters, prompts and rates.

    python -m benchmarks.rl_trl --trl-python PYTHON --model tiny=DIR --task digits --steps 30 --learning-rate 1e-2 \
        --max-tokens 8 --seeds 0 1 2 --out FILE

PYTHON is of an environment with trl, datasets and the same torch, transformers and peft. A step is 8 prompts of 8
answers. Both libraries train at the same time, each on one thread, so that both meet the same machine; processor
seconds are of all processes of each. FILE keeps the runs of earlier calls: further seeds are added to them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gradserve.tracking.statistics import estimate

from .versus import Point, add_runs, arguments, at, reached, trailing

WINDOW, AIM = 3, 0.6


def compared(ours: list[Point], theirs: list[Point]) -> dict[str, Any]:
    """One seed: the mean reward of three steps at equal cost, the cost of a reward of 0.6, reward per minute."""
    mine, other = trailing(ours, WINDOW), trailing(theirs, WINDOW)
    both = min(mine[-1][0], other[-1][0])
    until = [reached(each, AIM, rising=True) for each in (mine, other)]
    first, second = until
    found: dict[str, Any] = {
        "cpu_s_of_a_step": [ours[-1][0] / len(ours), theirs[-1][0] / len(theirs)],
        "reward_after_equal_cpu_s": [both, at(mine, both), at(other, both)],
        "cpu_s_until_0.6": until,
        "last_reward": [mine[-1][1], other[-1][1]],
        "step_ratio": theirs[-1][0] / len(theirs) * len(ours) / ours[-1][0],
        "reward_per_cpu_minute_ratio": (mine[-1][1] / mine[-1][0]) / (other[-1][1] / other[-1][0]),
    }
    return found | ({"until_0.6_ratio": second / first} if first and second else {})


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each seed, and every ratio (TRL's cost over ours: above 1 is ours) with its 95 % interval over the seeds."""
    seeds = [compared(run["gradserve"]["points"], run["trl"]["points"]) for run in runs]
    names = sorted({name for seed in seeds for name in seed if name.endswith("_ratio")})
    ratios = {name: str(estimate([seed[name] for seed in seeds if name in seed])) for name in names}
    return {"seeds": seeds, "ratios": ratios}


def main() -> None:
    """Run, print, add to the file."""
    parser = arguments(__doc__)
    parser.add_argument("--task", choices=["addition", "digits"], required=True)
    parser.add_argument("--max-tokens", type=int, default=16)
    asked: argparse.Namespace = parser.parse_args()
    name, _, folder = asked.model.partition("=")
    settings = {
        "task": asked.task,
        "steps": asked.steps,
        "learning_rate": asked.learning_rate,
        "max_tokens": asked.max_tokens,
    }
    add_runs("rl", name, Path(folder), settings, asked, summary)


if __name__ == "__main__":
    main()
