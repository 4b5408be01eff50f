"""An engine and a sampler in this process, for benchmarks that ask what the engine alone does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.base import Bases
from gradserve.compute.engine.engine import Engine
from gradserve.compute.engine.kernels import FAST, Kernels
from gradserve.compute.engine.sampler import Sampler
from gradserve.compute.objects import ObjectStore
from gradserve.compute.tasks import BaseSpec, Done, GradTask, InitTask, SampleTask
from gradserve.wire.data import Array, Row, as_tokens
from gradserve.wire.ops import LoraConfig, Sample, SamplingParams

SMALLEST_ID = 8
"""Ids below are special in the random models."""


class Lab:
    """One base under one device, number format and kernels."""

    def __init__(
        self,
        folder: Path,
        path: str,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels = FAST,
        kv_cache_bytes: int = 2 << 30,
        pass_tokens: int = 1024,
    ) -> None:
        self.arrays = Arrays(ObjectStore(folder / "fast", folder / "durable"), device)
        bases = Bases((BaseSpec("base", path),), device, dtype, kernels)
        self.vocab = bases.get("base").vocab
        self.engine = Engine(bases, self.arrays)
        self.sampler = Sampler(bases, self.arrays, kv_cache_bytes, pass_tokens)

    def trained_adapter(self, seed: int, rank: int = 8) -> str:
        """An adapter as if already trained: B is random instead of zero, yet so small that the model still talks."""
        fresh = _done(self.engine.run(InitTask("init", "base", LoraConfig(rank, seed)))).objects["weights"]
        draw = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(tensor.shape, generator=draw) * 0.01 if "lora_B" in name else tensor
            for name, tensor in sorted(self.arrays.get(fresh).items())
        }
        return self.arrays.put(tensors)

    def grad(self, weights: str, rows: list[Row]) -> Done:
        """One forward_backward."""
        return _done(self.engine.run(GradTask("grad", "base", weights, rows, "cross_entropy", {}, backward=True)))

    def gradient(self, weights: str, rows: list[Row]) -> dict[str, torch.Tensor]:
        """The gradient of a forward_backward."""
        return self.arrays.get(self.grad(weights, rows).objects["gradient"])

    def forward(self, weights: str, rows: list[Row]) -> list[NDArray[Any]]:
        """Log-probs of the targets, row by row."""
        done = _done(self.engine.run(GradTask("fwd", "base", weights, rows, "cross_entropy", {}, backward=False)))
        assert done.rows is not None
        return [array.numpy() for array in done.rows.logprobs]

    def sample(
        self, weights: str | list[str], prompts: list[NDArray[np.int32]], new: int, seed: int = 0
    ) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Tokens and log-probs of one continuation of each prompt, all together. Adapters take turns."""
        adapters = [weights] if isinstance(weights, str) else weights
        for index, prompt in enumerate(prompts):
            op = Sample(
                "base", adapters[index % len(adapters)], as_tokens(prompt), 1, SamplingParams(new, seed + index)
            )
            self.sampler.add(SampleTask(str(index), op))
        found: dict[str, Done] = {}
        while self.sampler.busy:
            for outcome in self.sampler.step():
                done = _done(outcome)
                found[done.task_id] = done
        sequences = [found[str(index)].sample.sequences[0] for index in range(len(prompts))]  # type: ignore[union-attr]
        return [(np.frombuffer(s.tokens, "<i4"), np.frombuffer(s.logprobs, "<f4")) for s in sequences]


def random_ids(length: int, vocab: int, seed: int) -> NDArray[np.int32]:
    """Uniform ids; the same for the same arguments."""
    return np.random.default_rng(seed).integers(SMALLEST_ID, vocab, length).astype(np.int32)


def as_row(tokens: NDArray[np.int32]) -> Row:
    """Each position predicts the next token (the last one the first), every token weighing one."""
    return Row(as_tokens(tokens), {"target_tokens": Array.of(np.roll(tokens, -1).astype(np.int64))})


def _done(outcome: object) -> Done:
    if not isinstance(outcome, Done):
        raise RuntimeError(f"the engine failed: {outcome}")
    return outcome
