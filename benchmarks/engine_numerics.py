"""What exactness costs, and what half precision gives: modes of one engine in this process, on one thread.

For each mode: processor seconds of a training step's forward_backward and of sampling, and how far the sampler's
log-probabilities are from the trainer's and from those of the float32 trainer on the same tokens.

    python -m benchmarks.engine_numerics --model smol=DIR --out benchmarks/baselines/NAME.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradserve.compute.engine.invariant import BatchInvariant
from gradserve.compute.engine.kernels import FAST, Kernels

from .engine_lab import Lab, as_row, random_ids
from .run import conditions

MODES: dict[str, tuple[torch.dtype, type[BatchInvariant] | None]] = {
    "fast float32": (torch.float32, None),
    "batch_invariant": (torch.float32, BatchInvariant),
    "fast bfloat16": (torch.bfloat16, None),
    "fast float16": (torch.float16, None),
}
ROWS, LENGTH = 8, 128
SAMPLES, PROMPT, NEW = 64, 32, 32
COMPARED = 12
"""Sequences whose log-probabilities are compared: the trainer scores each alone, which takes a while."""


def measure(path: str, device: str) -> dict[str, Any]:
    """Every mode on the same adapter, rows and prompts."""
    found: dict[str, Any] = {}
    reference: Lab | None = None
    with tempfile.TemporaryDirectory(prefix="bench-numerics-") as folder:
        for name, (dtype, mode) in MODES.items():
            if mode is not None and device != "cpu":
                continue
            kernels: Kernels = FAST if mode is None else mode()
            lab = Lab(Path(folder), path, torch.device(device), dtype, kernels)
            reference = reference or lab
            found[name] = _one(lab, reference)
            print(name, json.dumps(found[name]), flush=True)
    return found


def _one(lab: Lab, reference: Lab) -> dict[str, Any]:
    adapter = lab.trained_adapter(seed=1)
    rows = [as_row(random_ids(LENGTH, lab.vocab, seed)) for seed in range(ROWS)]
    lab.grad(adapter, rows)  # warm
    began = time.process_time()
    lab.grad(adapter, rows)
    train_s = time.process_time() - began
    prompts = [random_ids(PROMPT, lab.vocab, 100 + seed) for seed in range(SAMPLES)]
    lab.sample(adapter, prompts[:2], 2)
    began = time.process_time()
    drawn = lab.sample(adapter, prompts, NEW)
    sample_s = time.process_time() - began
    began = time.process_time()
    lab.sample(adapter, prompts[:1], NEW // 2)
    single_s = time.process_time() - began
    return {
        "train_tokens_per_cpu_s": round(ROWS * LENGTH / train_s, 1),
        "sample_tokens_per_cpu_s": round(SAMPLES * NEW / sample_s, 1),
        "one_row_tokens_per_cpu_s": round(NEW // 2 / single_s, 2),
        "sampler_vs_trainer": _gap(lab, adapter, prompts, drawn),
        "sampler_vs_float32_trainer": _gap(reference, adapter, prompts, drawn),
    }


def _gap(lab: Lab, adapter: str, prompts: list[Any], drawn: list[tuple[Any, Any]]) -> dict[str, float]:
    """Largest and mean |log-prob of the sampler - of ``lab``'s trainer| over the tokens of the first sequences."""
    drawn = drawn[:COMPARED]
    whole = [np.concatenate([prompt, tokens]) for prompt, (tokens, _) in zip(prompts, drawn, strict=False)]
    gaps = [
        np.abs(mine - scores[PROMPT - 1 : -1])
        for (_, mine), tokens in zip(drawn, whole, strict=True)
        for scores in lab.forward(adapter, [as_row(tokens)])
    ]
    every = np.concatenate(gaps)
    return {"max": float(f"{every.max():.2e}"), "mean": float(f"{every.mean():.2e}")}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="NAME=DIRECTORY of the model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, _, path = arguments.model.partition("=")
    record = {"model": name, "device": arguments.device, **conditions(), **measure(path, arguments.device)}
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
