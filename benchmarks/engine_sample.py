"""The sampler alone, in this process, in CPU seconds: against the machine's own limits and transformers' generate.

    python -m benchmarks.engine_sample MODEL_DIR --out benchmarks/baselines/NAME.json

Unlike the other scenarios this one looks inside gradserve. What is compared is run in turn, ``--repeats`` times, and
the least CPU time counts: on a shared machine the rest is what neighbours took. Floors are measured in the same run:
the base's own matrices in a plain loop of F.linear, which at 64 rows is bound by arithmetic and at one by reading.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.base import Bases
from gradserve.compute.engine.lora import init_adapter
from gradserve.compute.engine.sampler import Sampler
from gradserve.compute.objects import ObjectStore
from gradserve.compute.tasks import BaseSpec, Done, SampleTask
from gradserve.wire.data import as_tokens
from gradserve.wire.ops import LoraConfig, Sample, SamplingParams

CPU = torch.device("cpu")
ROWS, PROMPT, RANK, ADAPTERS = 64, 32, 8, 4
SHARED_PROMPT, SHARED_SAMPLES = 128, 8


class Bench:
    """A sampler over one model, with adapters whose B is not zero."""

    def __init__(self, model: str, objects: Path) -> None:
        self.model = model
        self.arrays = Arrays(ObjectStore(objects, objects), CPU)
        self.bases = Bases((BaseSpec("model", model),), CPU)
        self.base = self.bases.get("model")
        self.adapters = [self._adapter(seed) for seed in range(ADAPTERS)]

    def _adapter(self, seed: int) -> str:
        generator = torch.Generator().manual_seed(seed)
        tensors = init_adapter(self.base.targets, LoraConfig(RANK, seed))
        return self.arrays.put(
            {n: torch.randn(t.shape, generator=generator) * 0.02 if "lora_B" in n else t for n, t in tensors.items()}
        )

    def prompts(self, count: int, length: int = PROMPT) -> np.ndarray[Any, np.dtype[np.int32]]:
        """int32 [count, length]"""
        return np.random.default_rng(count).integers(5, self.base.vocab, (count, length)).astype(np.int32)

    def passes(self, ops: list[Sample]) -> list[tuple[float, int]]:
        """(CPU seconds, tokens finished) of every pass, from an empty prefix cache."""
        sampler = Sampler(self.bases, self.arrays, 1 << 30, 512)
        for index, op in enumerate(ops):
            sampler.add(SampleTask(str(index), op))
        passes = []
        while sampler.busy:
            began = time.process_time()
            done = [outcome for outcome in sampler.step() if isinstance(outcome, Done)]
            passes.append((time.process_time() - began, sum(outcome.usage.sample_tokens for outcome in done)))
        return passes

    def ops(
        self, rows: int, new: int, adapters: list[str | None], samples: int = 1, length: int = PROMPT
    ) -> list[Sample]:
        """``rows`` prompts, adapters interleaved; the draws are plain."""
        return [
            Sample("model", adapters[i % len(adapters)], as_tokens(prompt), samples, SamplingParams(new, i))
            for i, prompt in enumerate(self.prompts(rows, length))
        ]


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def floors(bench: Bench) -> dict[str, Any]:
    """One pass through all matrices, at several numbers of rows, and the rate of reading memory."""
    weights = [linear.weight for linear in bench.base.targets.values()]
    result: dict[str, Any] = {}
    for rows in (1, 8, ROWS):
        inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]) for weight in weights}

        def run(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

        seconds = min(cpu_s(run) for _ in range(8))
        flops = sum(2 * rows * weight.numel() for weight in weights)
        result[str(rows)] = {"pass_s": seconds, "gflop_per_s": flops / seconds / 1e9}
    size = sum(4 * weight.numel() for weight in weights)
    read = torch.ones(max(size // 4, 1 << 26))
    result["read_gb_per_s"] = 4 * read.numel() / min(cpu_s(read.sum) for _ in range(5)) / 1e9
    result["weights_mb"] = size / 1e6
    return result


def decode(bench: Bench, rows: int, adapters: list[str | None], new: int) -> float:
    """The least CPU seconds of a pass in which all ``rows`` decode."""
    passes = bench.passes(bench.ops(rows, new, adapters))
    return min(seconds for seconds, _ in passes[len(passes) - new + 2 : -2])


def whole(bench: Bench, adapters: list[str | None], new: int) -> tuple[float, int]:
    """CPU seconds and tokens of ROWS sequences, prefill and all."""
    passes = bench.passes(bench.ops(ROWS, new, adapters))
    return sum(seconds for seconds, _ in passes), sum(tokens for _, tokens in passes)


def generate(bench: Bench, model: Any, new: int) -> tuple[float, int]:
    """The same by transformers: one batch of equal prompts, which is the shape it likes best."""
    prompts = torch.from_numpy(bench.prompts(ROWS).astype(np.int64))
    mask, arguments = torch.ones_like(prompts), {"do_sample": True, "top_k": 0, "max_new_tokens": new}

    def run() -> None:
        with torch.no_grad():
            out = model.generate(prompts, attention_mask=mask, min_new_tokens=new, pad_token_id=0, **arguments)
        assert out.shape[1] == PROMPT + new

    return cpu_s(run), ROWS * new


def prefill(bench: Bench, shared: bool) -> float:
    """CPU seconds until SHARED_SAMPLES sequences have their first token: of one prompt, or of as many prompts."""
    prompts, samples = (1, SHARED_SAMPLES) if shared else (SHARED_SAMPLES, 1)
    return sum(s for s, _ in bench.passes(bench.ops(prompts, 1, [None], samples, SHARED_PROMPT)))


def measure(bench: Bench, new: int, repeats: int) -> dict[str, Any]:
    """All of it; every time is the least of ``repeats``."""
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()
    one, four = [bench.adapters[0]], list(bench.adapters)
    works: dict[str, Callable[[], Any]] = {
        "floors": lambda: floors(bench),
        "rows 1": lambda: decode(bench, 1, [None], new),
        "rows 8": lambda: decode(bench, 8, [None], new),
        f"rows {ROWS}": lambda: decode(bench, ROWS, [None], new),
        f"rows {ROWS}, 1 adapter": lambda: decode(bench, ROWS, [*one], new),
        f"rows {ROWS}, {ADAPTERS} adapters": lambda: decode(bench, ROWS, [*four], new),
        "prefill shared": lambda: prefill(bench, shared=True),
        "prefill apart": lambda: prefill(bench, shared=False),
        "all": lambda: whole(bench, [None], new),
        f"all, {ADAPTERS} adapters": lambda: whole(bench, [*four], new),
        "all, transformers": lambda: generate(bench, model, new),
    }
    seen: dict[str, list[Any]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            seen[name].append(work())
    return report(seen)


def report(seen: dict[str, list[Any]]) -> dict[str, Any]:
    """Least times, shares of the floors and rates."""
    floor = {rows: min(measured[rows]["pass_s"] for measured in seen["floors"]) for rows in ("1", "8", str(ROWS))}
    passes = {name: min(times) for name, times in seen.items() if name.startswith("rows")}
    rates = {
        name.removeprefix("all, "): round(max(tokens / seconds for seconds, tokens in runs), 1)
        for name, runs in seen.items()
        if name.startswith("all")
    }
    return {
        "floors": min(seen["floors"], key=lambda measured: measured[str(ROWS)]["pass_s"]),
        "decode_pass_ms": {name: round(1000 * seconds, 2) for name, seconds in passes.items()},
        "share_of_linear_floor": {
            name: round(floor[name.split(",")[0].removeprefix("rows ")] / seconds, 3)
            for name, seconds in passes.items()
        },
        "tokens_per_cpu_s": rates,
        "prefill_apart_over_shared": round(min(seen["prefill apart"]) / min(seen["prefill shared"]), 2),
    }


def main() -> None:
    """Measure one model and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as objects:
        measured = measure(Bench(args.model, Path(objects)), args.new_tokens, args.repeats)
    shape = f"{ROWS}x{args.new_tokens}, prompts of {PROMPT}"
    record = {
        "model": Path(args.model).name,
        "shape": shape,
        "repeats": args.repeats,
        "load1": round(load, 2),
        **measured,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
