"""One script for a machine with a GPU: first whether the numbers are right, then how fast they come.

    python -m benchmarks.gpu --model NAME=DIR [--device cuda] [--out benchmarks/baselines/NAME.json]

Correctness: log-probabilities, gradients and samples of the device against the same engine on this machine's CPU in
float32; a wrong one ends the script with status 1 after everything has been printed. Speed: tokens per second of
forward_backward and of sampling, by number format, rows and number of adapters. Wall time, the device synchronised.
With ``--device cpu`` it checks itself on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradserve.compute.engine.kernels import FAST, Kernels

from .engine_lab import Lab, as_row, random_ids
from .run import conditions

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 0.3}
"""Largest |log-prob difference| to the CPU in float32 that is taken for rounding, for logits of size 10."""
ALIKE = {torch.float32: 0.9999, torch.bfloat16: 0.98}
"""Smallest cosine between the device's whole gradient and the CPU's."""
LENGTHS = (1, 37, 130, 64, 5, 300)
SHAPES = ((1, 1), (8, 1), (64, 1), (64, 4), (256, 1), (256, 64))
"""(sequences, adapters) of the sampling figures."""


def kernels_of(device: torch.device) -> Kernels:
    """What a worker on that device would use."""
    if device.type == "cpu":
        return FAST
    from gradserve.compute.engine.cuda import Cuda

    return Cuda()


def check(folder: Path, path: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Differences between the device and the CPU in float32."""
    here = Lab(folder / "cpu", path, CPU)
    there = Lab(folder / "device", path, device, dtype, kernels_of(device))
    mine, theirs = here.trained_adapter(1), there.trained_adapter(1)
    rows = [as_row(random_ids(length, here.vocab, length)) for length in LENGTHS]
    want, got = here.forward(mine, rows), there.forward(theirs, rows)
    logprob_gap = max(float(np.abs(a - b).max()) for a, b in zip(want, got, strict=True))
    cosine = _cosine(here.gradient(mine, rows), there.gradient(theirs, rows))
    prompts = [random_ids(length, here.vocab, 50 + length) for length in LENGTHS]
    adapters = [there.trained_adapter(seed, rank=4 + seed % 5) for seed in range(len(prompts))]
    drawn = there.sample(adapters, prompts, 24)
    sampler_gap = 0.0
    for adapter, prompt, (tokens, logprobs) in zip(adapters, prompts, drawn, strict=True):
        (scores,) = there.forward(adapter, [as_row(np.concatenate([prompt, tokens]))])
        sampler_gap = max(sampler_gap, float(np.abs(logprobs - scores[len(prompt) - 1 : -1]).max()))
    right = logprob_gap < BOUNDS[dtype] and sampler_gap < BOUNDS[dtype] and cosine > ALIKE[dtype]
    return {
        "right": right,
        "logprobs_vs_cpu": float(f"{logprob_gap:.2e}"),
        "sampler_vs_trainer": float(f"{sampler_gap:.2e}"),
        "gradient_cosine_vs_cpu": round(cosine, 6),
    }


def _cosine(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    a = torch.cat([want[name].flatten().double() for name in sorted(want)])
    b = torch.cat([got[name].flatten().double().cpu() for name in sorted(want)])
    return float(a @ b / (a.norm() * b.norm()))


def speed(folder: Path, path: str, device: torch.device, dtype: torch.dtype, new: int) -> dict[str, Any]:
    """Tokens per second; the second of two runs counts."""
    lab = Lab(folder / "speed", path, device, dtype, kernels_of(device))
    adapters = [lab.trained_adapter(seed) for seed in range(64)]
    found: dict[str, Any] = {}
    for count, length in ((8, 128), (8, 512)):
        rows = [as_row(random_ids(length, lab.vocab, seed)) for seed in range(count)]
        found[f"train {count}x{length}"] = _rate(count * length, device, partial(lab.grad, adapters[0], rows))
    for count, owners in SHAPES:
        prompts = [random_ids(32, lab.vocab, seed) for seed in range(count)]
        draw = partial(lab.sample, adapters[:owners], prompts, new)
        found[f"sample {count} rows, {owners} adapters"] = _rate(count * new, device, draw)
    if device.type == "cuda":
        found["peak_mib"] = round(torch.cuda.max_memory_allocated(device) / 2**20)
    return found


def _rate(tokens: int, device: torch.device, run: Callable[[], Any]) -> float:
    run()
    _wait(device)
    began = time.perf_counter()
    run()
    _wait(device)
    return round(tokens / (time.perf_counter() - began), 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, action="append", help="NAME=DIRECTORY; may be repeated")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--new", type=int, default=64, help="tokens to sample per sequence (default: %(default)s)")
    parser.add_argument("--check-only", action="store_true", help="no figures")
    parser.add_argument("--out", type=Path, help="file to write")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    record: dict[str, Any] = {"device": _name(device), **conditions()}
    for name, _, path in (model.partition("=") for model in arguments.model):
        for dtype in BOUNDS:
            with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
                found = check(Path(folder), path, device, dtype)
                if not arguments.check_only:
                    found |= speed(Path(folder), path, device, dtype, arguments.new)
            record[f"{name} {str(dtype).removeprefix('torch.')}"] = found
            print(name, dtype, json.dumps(found), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    wrong = [key for key, found in record.items() if isinstance(found, dict) and found.get("right") is False]
    if wrong:
        sys.exit(f"wrong numbers: {', '.join(wrong)}")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
