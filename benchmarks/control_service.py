"""What the service costs a control policy: PPOTrainer on CartPole against the same algorithm as a plain script.

    python -m benchmarks.control_service --seeds 3 --batch 1024 --out FILE

Processor seconds of this process, the server and its workers together, by turns of a few epochs with the plain script
and with the engine's functions in a loop (benchmarks/control.py), so that all meet the same machine. Starting is apart:
it is paid once, whatever is trained. Every process computes on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch

import gradserve
from gradserve.wire.control import EnvSpec
from gradserve.wire.control_defaults import ControlDefaults, defaults_for

from .control import plain_cartpole, updates
from .run import conditions

ENVIRONMENT = "CartPole-v1"
TURN = 5
"""Epochs of one before it is the other's turn."""
EPISODES = 20


def spent() -> dict[str, float]:
    """Processor seconds so far by process: client, server, and what the server started."""
    found: dict[str, float] = {}
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        times = process.cpu_times()
        words = " ".join(process.cmdline())
        kind = "client" if process == here else "server" if " serve " in words else "workers"
        found[kind] = found.get(kind, 0.0) + times.user + times.system
    return found


def less(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """What was spent in between."""
    return {kind: seconds - before.get(kind, 0.0) for kind, seconds in after.items()}


def through_service(seed: int, epochs: int, batch: int | None, found: dict[str, Any]) -> Iterator[None]:
    """Epochs of PPOTrainer; yields after each turn. What it cost goes into ``found``."""
    before = spent()
    with tempfile.TemporaryDirectory() as data, gradserve.connect(models={}, data_dir=data) as service:
        trainer = gradserve.PPOTrainer(
            None, {"id": ENVIRONMENT}, batch, service=service, seed=seed, learning_rate="linear_1e-3"
        )
        trainer.evaluate(1)
        found["start_cpu_s"] = sum(less(spent(), before).values())
        cost: dict[str, float] = {}
        for _ in range(epochs // TURN):
            before = spent()
            # With a callback nothing is sent ahead: a turn costs what it costs, and no more waits for the next.
            trainer.train(max_epochs=epochs, callback=lambda row: row["epoch"] % TURN == 0)
            cost = {kind: cost.get(kind, 0.0) + value for kind, value in less(spent(), before).items()}
            if "solved_at_cpu_s" not in found and trainer.evaluate(EPISODES)["episode_return"] == 500:
                found["solved_at_steps"] = trainer.history[-1]["env_steps"]
                found["solved_at_cpu_s"] = sum(cost.values())
            yield
        found |= {"score": trainer.evaluate(EPISODES)["episode_return"], "env_steps": trainer.history[-1]["env_steps"]}
        found |= {f"{kind}_cpu_s": value for kind, value in cost.items()} | {"service_cpu_s": sum(cost.values())}


def compare(settings: ControlDefaults, seed: int, epochs: int, batch: int | None) -> dict[str, Any]:
    """One seed of all three, turn by turn."""
    total = epochs * settings.num_envs * settings.steps
    found: dict[str, Any] = {}
    service = through_service(seed, epochs, batch, found)
    loops = {
        "engine": updates(EnvSpec(ENVIRONMENT), settings, seed, total),
        "plain": plain_cartpole(settings, seed, total),
    }
    seconds = dict.fromkeys(loops, 0.0)
    for _ in service:
        for name, loop in loops.items():
            began = time.process_time()
            for _ in range(TURN):
                next(loop, None)
            seconds[name] += time.process_time() - began
    found |= {f"{name}_cpu_s": value for name, value in seconds.items()}
    found["over_plain"] = found["service_cpu_s"] / seconds["plain"]
    found["over_engine"] = found["service_cpu_s"] / seconds["engine"]
    return {name: round(value, 3) for name, value in found.items()}


def interval(values: list[float]) -> list[float]:
    """Mean and its 95 % interval (Student's t for 3 to 5 seeds)."""
    factor = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), float("nan"))
    mean, half = float(np.mean(values)), factor * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return [round(mean, 3), round(mean - half, 3), round(mean + half, 3)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=1024, help="transitions per epoch")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GRADSERVE_WORKER_THREADS": "1"}
    torch.set_num_threads(1)
    defaults = defaults_for(ENVIRONMENT)
    settings = msgspec.structs.replace(defaults, num_envs=asked.batch // defaults.steps)
    runs = []
    for seed in range(asked.seeds):
        runs.append(compare(settings, seed, asked.epochs, asked.batch))
        print(json.dumps(runs[-1]), flush=True)
    ratios = {name: interval([run[name] for run in runs]) for name in ("over_plain", "over_engine")}
    print(json.dumps(ratios), flush=True)
    if asked.out:
        found = {"batch": asked.batch, "epochs": asked.epochs, "runs": runs, "mean_and_95_percent": ratios}
        asked.out.write_text(json.dumps({"conditions": conditions(), "control_service": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
