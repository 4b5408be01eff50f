"""The built-in sampler beside the vllm sampler, without server: tokens per CPU second, and how far from the trainer.

    python -m benchmarks.engine_vllm MODEL_DIRECTORY --out benchmarks/baselines/2core-engine-vllm.json

Needs the environment of `make vllm`. 64 prompts of 32 random tokens, 64 new tokens each, one thread, one process per
engine, engines and scenarios taken in turn. Starting an engine, loading adapters and fingerprints are not measured.
`vllm_plain` is vLLM without support for adapters, driven by the same loop: what the others are measured against.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = ("builtin", "vllm", "vllm_plain")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 64
ADAPTERS, RANK = 4, 8
ROUNDS = 1
COMPARED = 8
"""Sequences of a scenario whose log-probs are compared with the trainer's."""

SCENARIOS = {"base": None, "adapters": False, "adapters_with_lm_head": True}
"""By name: None for no adapter, else whether the four adapters are also on lm_head."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help="measure one, in this process")
    arguments = parser.parse_args()
    if arguments.engine:
        print(json.dumps(measure(arguments.engine, arguments.model)))
        return
    record = {
        "bench": "engine_vllm",
        "model": arguments.model.name.partition(".")[0],
        "shape": {"prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "rank": RANK},
        "load1": round(os.getloadavg()[0], 1),
        "engines": {engine: _in_a_process(engine, arguments.model) for engine in ENGINES},
    }
    text = json.dumps(record, indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def _in_a_process(engine: str, model: Path) -> Any:
    command = [sys.executable, "-m", "benchmarks.engine_vllm", str(model), "--engine", engine]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    return json.loads(ran.stdout.splitlines()[-1])


def measure(engine: str, model: Path) -> dict[str, Any]:
    """Figures of one engine by scenario."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(engine, model, Path(folder))
        names = [name for name, head in SCENARIOS.items() if engine != "vllm_plain" or head is None]
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for name in names:
            bench.run(name, prompts=8, new_tokens=2)
        for _ in range(ROUNDS):
            for name in names:
                rounds[name].append(bench.run(name, PROMPTS, NEW_TOKENS))
                print(engine, name, rounds[name][-1], file=sys.stderr, flush=True)
        return {name: _summary(of) | bench.mismatch(name) for name, of in rounds.items()}


def _summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    return {key: [round(one[key], 2) for one in rounds] for key in rounds[0]}


class Bench:
    """One engine with its adapters."""

    def __init__(self, engine: str, model: Path, folder: Path) -> None:
        import torch

        from gradserve.compute.engine.arrays import Arrays
        from gradserve.compute.engine.base import Bases
        from gradserve.compute.objects import ObjectStore
        from gradserve.compute.tasks import BaseSpec

        self._model = model
        self._bases = Bases((BaseSpec("m", str(model)),), torch.device("cpu"))
        self._base = self._bases.get("m")
        self._arrays = Arrays(ObjectStore(folder, folder), torch.device("cpu"))
        self._weights = {
            name: [None] if head is None else [self._adapter(seed, head) for seed in range(ADAPTERS)]
            for name, head in SCENARIOS.items()
        }
        self._sampler = self._make(engine, folder)
        self._results: dict[str, list[tuple[Any, Any]]] = {}

    def _make(self, engine: str, folder: Path) -> Any:
        from gradserve.compute.engine.sampler import Sampler
        from gradserve.compute.engine.vllm_engine import VllmEngine
        from gradserve.compute.engine.vllm_sampler import VllmSampler, say

        if engine == "builtin":
            return Sampler(self._bases, self._arrays, 1 << 30, 1024)
        kind = VllmEngine if engine == "vllm" else _plain()

        def start(base: Any) -> Any:
            return kind(str(self._model), base.context, 1 << 30, 1024, RANK, 16)

        return VllmSampler("m", self._bases, self._arrays, start, folder / "vllm", RANK, say)

    def _adapter(self, seed: int, head: bool) -> str:
        import torch

        from gradserve.compute.engine.lora import init_adapter
        from gradserve.wire.ops import LoraConfig

        tensors = init_adapter(self._base.targets, LoraConfig(RANK, seed, train_unembed=head))
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in tensors.items():
            if "lora_B" in name:
                tensor.normal_(0.0, 0.02, generator=generator)
        return self._arrays.put(tensors)

    def run(self, scenario: str, prompts: int, new_tokens: int) -> dict[str, float]:
        """The first ``prompts`` prompts at temperature 1."""
        from gradserve.compute.tasks import Done, SampleTask
        from gradserve.wire.data import as_tokens
        from gradserve.wire.ops import Sample, SamplingParams

        ops = {}
        for index, prompt in enumerate(self._prompts()[:prompts]):
            weights = self._weights[scenario][index % len(self._weights[scenario])]
            ops[str(index)] = Sample("m", weights, as_tokens(prompt), 1, SamplingParams(new_tokens, seed=index))
        started, wall = time.process_time(), time.monotonic()
        for key, op in ops.items():
            self._sampler.add(SampleTask(key, op))
        found: list[tuple[Any, Any]] = []
        while self._sampler.busy:
            for outcome in self._sampler.step():
                if not isinstance(outcome, Done):
                    raise RuntimeError(outcome.message + outcome.traceback)
                found.append((ops[outcome.task_id], outcome.sample))
        spent, wall = time.process_time() - started, time.monotonic() - wall
        tokens = sum(len(sequence.tokens) // 4 for _, sample in found for sequence in sample.sequences)
        self._results[scenario] = found
        return {"tokens_per_cpu_s": tokens / spent, "cpu_s": spent, "wall_s": wall}

    def _prompts(self) -> list[Any]:
        import numpy as np

        draw = np.random.default_rng(0)
        return [draw.integers(0, self._base.vocab, PROMPT_TOKENS).astype(np.int32) for _ in range(PROMPTS)]

    def mismatch(self, scenario: str) -> dict[str, float]:
        """|log-prob of the last round's samples - the trainer's log-prob|."""
        import numpy as np

        from gradserve.compute.engine.train import score
        from gradserve.compute.engine.vllm_adapters import no_change
        from gradserve.wire.data import Array, Row, as_tokens

        differences = []
        for op, sample in self._results[scenario][:COMPARED]:
            weights = no_change(self._base) if op.weights is None else self._arrays.get(op.weights)
            prompt = np.frombuffer(op.prompt, "<i4")
            for sequence in sample.sequences:
                whole = np.concatenate([prompt, np.frombuffer(sequence.tokens, "<i4")])
                row = Row(as_tokens(whole[:-1]), {"target_tokens": Array.of(whole[1:].astype(np.int64))})
                ours = score(self._base, weights, [row]).logprobs[0].numpy()[len(prompt) - 1 :]
                differences.append(np.abs(np.frombuffer(sequence.logprobs, "<f4") - ours))
        every = np.concatenate(differences)
        return {"diff_max": float(f"{every.max():.2e}"), "diff_mean": float(f"{every.mean():.2e}")}


def _plain() -> Any:
    """VllmEngine without adapters: everything is the base."""
    from gradserve.compute.engine import vllm_engine

    class Plain(vllm_engine.VllmEngine):
        def _arguments(self, **given: Any) -> Any:
            return super()._arguments(**{name: value for name, value in given.items() if "lora" not in name})

        def _lora_request(self, adapter: vllm_engine.PeftFolder) -> None:
            return None

        def load(self, adapter: vllm_engine.PeftFolder) -> None:
            return None

    return Plain


if __name__ == "__main__":
    main()
