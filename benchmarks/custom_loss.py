"""A loss of the user's own beside the weights against the SDK's road for it: one pass, or two and a trip to the client.

    python -m benchmarks.custom_loss tiny=DIR mid=DIR --out FILE

Steps by turns on one server, so that both meet the same machine. The loss is PPO's on 8 rows of 128 tokens; seconds are
of forward_backward alone, processor seconds those of client, server and workers together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types
from torch import Tensor

import gradserve

from .control_service import spent
from .run import conditions

ROWS, TOKENS = 8, 128
WARM_UP, TURNS = 3, 20


def ppo(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    return -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask).sum()


def on_the_client(rows: list[types.Datum], found: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The same loss as a callable for forward_backward_custom."""
    total = torch.zeros(())
    for row, logprobs in zip(rows, found, strict=True):
        old, advantages = (torch.tensor(row.loss_fn_inputs[name].tolist()) for name in ("logprobs", "advantages"))
        total = total + ppo(logprobs, torch.ones_like(logprobs), old, advantages)
    return total, {}


def batch(generator: torch.Generator) -> list[types.Datum]:
    """Random rows with a sampler's log-probs and advantages."""
    rows = []
    for _ in range(ROWS):
        ids = torch.randint(20, 300, (TOKENS + 1,), generator=generator).tolist()
        old = (torch.randn(TOKENS, generator=generator) * 0.1 - 5).tolist()
        advantages = torch.randn(TOKENS, generator=generator).tolist()
        inputs: Any = {"target_tokens": ids[1:], "logprobs": old, "advantages": advantages}
        rows.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    return rows


def measure(name: str, folder: str) -> dict[str, Any]:
    """Medians of both roads on one model."""
    with tempfile.TemporaryDirectory() as data, gradserve.connect(models={name: folder}, data_dir=data) as service:
        run: tinker.TrainingClient = service.create_lora_training_client(base_model=name, rank=8).result()
        loss: Any = gradserve.loss(ppo)
        roads: dict[str, Callable[[list[types.Datum]], Any]] = {
            "graph": lambda rows: run.forward_backward(rows, loss).result(),
            "two_passes": lambda rows: run.forward_backward_custom(rows, on_the_client).result(),
        }
        rows = batch(torch.Generator().manual_seed(0))
        wall: dict[str, list[float]] = {road: [] for road in roads}
        cpu: dict[str, list[float]] = {road: [] for road in roads}
        for turn in range(WARM_UP + TURNS):
            for road, call in roads.items():
                before, began = sum(spent().values()), time.perf_counter()
                call(rows)
                if turn >= WARM_UP:
                    wall[road].append(time.perf_counter() - began)
                    cpu[road].append(sum(spent().values()) - before)
                run.optim_step(types.AdamParams(learning_rate=0.0)).result()
    found: dict[str, Any] = {f"{road}_s": statistics.median(wall[road]) for road in roads}
    found |= {f"{road}_cpu_s": statistics.median(cpu[road]) for road in roads}
    found["ratio_wall"] = found["graph_s"] / found["two_passes_s"]
    found["ratio_cpu"] = found["graph_cpu_s"] / found["two_passes_cpu_s"]
    return {key: round(value, 4) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report = {"conditions": conditions(), "shape": f"{ROWS} x {TOKENS} tokens, medians of {TURNS} turns"}
    for model in given.models:
        name, _, folder = model.partition("=")
        report[name] = measure(name, folder)
        print(name, json.dumps(report[name]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
