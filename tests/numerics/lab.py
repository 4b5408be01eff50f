"""An engine and a sampler in this process, and short ways to ask them something."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.base import Base, Bases
from gradserve.compute.engine.engine import Engine, TrainingTask
from gradserve.compute.engine.kernels import FAST, Kernels
from gradserve.compute.engine.sampler import Sampler
from gradserve.compute.objects import ObjectStore
from gradserve.compute.tasks import BaseSpec, Done, Failed, GradTask, InitTask, SampleTask
from gradserve.wire.data import Array, Row, as_tokens
from gradserve.wire.ops import LoraConfig, Sample, SamplingParams
from gradserve.wire.results import ForwardBackwardResult, SampledSequence, SampleResult

Floats = NDArray[np.float32]
Tensors = dict[str, torch.Tensor]

CPU = torch.device("cpu")
LENGTHS = (1, 37, 5, 60, 2)
"""Ragged rows: one of a single token, two longer than the test models' window."""


class Lab:
    """``models`` are directories by the name under which a Task asks for them."""

    def __init__(
        self,
        objects: Path,
        models: dict[str, Path],
        kv_bytes: int = 1 << 26,
        pass_tokens: int = 512,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels = FAST,
    ) -> None:
        self.store = ObjectStore(objects, objects)
        self.arrays = Arrays(self.store, CPU)
        specs = tuple(BaseSpec(name, str(path)) for name, path in models.items())
        self.bases = Bases(specs, CPU, dtype, kernels)
        self.engine = Engine(self.bases, self.arrays)
        self.sampler = Sampler(self.bases, self.arrays, kv_bytes, pass_tokens)
        self.models = models

    def another_sampler(self, kv_bytes: int = 1 << 26, pass_tokens: int = 512) -> Sampler:
        """The same bases and objects under other limits."""
        return Sampler(self.bases, self.arrays, kv_bytes, pass_tokens)

    def base(self, name: str) -> Base:
        return self.bases.get(name)

    def run(self, task: TrainingTask) -> Done:
        outcome = self.engine.run(task)
        assert isinstance(outcome, Done), outcome
        return outcome

    def fail(self, task: TrainingTask) -> Failed:
        outcome = self.engine.run(task)
        assert isinstance(outcome, Failed), outcome
        return outcome

    def adapter(self, base: str, seed: int = 0, rank: int = 4, **flags: bool) -> str:
        """An adapter as if already trained: B is random instead of zero."""
        done = self.run(InitTask("init", base, LoraConfig(rank, seed, **flags)))
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(tensor.shape, generator=generator) * 0.05 if "lora_B" in name else tensor
            for name, tensor in sorted(self.arrays.get(done.objects["weights"]).items())
        }
        return self.arrays.put(tensors)

    def grad(self, base: str, weights: str, rows: list[Row], loss: str = "cross_entropy", **config: float) -> Done:
        return self.run(GradTask("grad", base, weights, rows, loss, config, backward=True))

    def gradient(self, done: Done) -> Tensors:
        return self.arrays.get(done.objects["gradient"])

    def forward(self, base: str, weights: str, rows: list[Row]) -> list[Floats]:
        """Log-probs of the targets, row by row."""
        return logprobs_of(rows_of(self.run(GradTask("fwd", base, weights, rows, "cross_entropy", {}, backward=False))))

    def sample(self, ops: list[Sample], sampler: Sampler | None = None) -> list[SampleResult]:
        """All in one go; results in the order of ``ops``."""
        return [sample_of(done) for done in self.sample_tasks(ops, sampler)]

    def sample_tasks(self, ops: list[Sample], sampler: Sampler | None = None) -> list[Done]:
        sampler = sampler or self.sampler
        for index, op in enumerate(ops):
            sampler.add(SampleTask(str(index), op))
        outcomes: dict[str, Done] = {}
        while sampler.busy:
            for outcome in sampler.step():
                assert isinstance(outcome, Done), outcome
                outcomes[outcome.task_id] = outcome
        return [outcomes[str(index)] for index in range(len(ops))]


def rows_of(done: Done) -> ForwardBackwardResult:
    assert done.rows is not None
    return done.rows


def sample_of(done: Done) -> SampleResult:
    assert done.sample is not None
    return done.sample


def logprobs_of(result: ForwardBackwardResult) -> list[Floats]:
    return [floats(array) for array in result.logprobs]


def floats(array: Array) -> Floats:
    assert array.dtype == "float32"
    return array.numpy().astype(np.float32)


def integers(array: Array) -> NDArray[np.int64]:
    return array.numpy().astype(np.int64)


def ids(seed: int, length: int, vocab: int = 320) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, vocab, length).astype(np.int32)


def row(tokens: NDArray[np.int32], **inputs: NDArray[np.generic]) -> Row:
    """A row over ``tokens`` whose position i predicts token i + 1 (the last one predicts token 0)."""
    targets = np.roll(tokens, -1).astype(np.int64)
    arrays = {"target_tokens": targets} | inputs
    return Row(as_tokens(tokens), {name: Array.of(np.asarray(values)) for name, values in arrays.items()})


def plain_rows(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    return [row(ids(seed * 100 + index, length)) for index, length in enumerate(lengths)]


def ask(
    base: str,
    prompt: NDArray[np.int32],
    weights: str | None = None,
    n: int = 1,
    seed: int = 0,
    max_tokens: int = 8,
    temperature: float = 1.0,
    stop_tokens: tuple[int, ...] = (),
    stop_strings: tuple[str, ...] = (),
    top_k: int = -1,
    top_p: float = 1.0,
    prompt_logprobs: bool = False,
    topk_prompt: int = 0,
    topk_sample: int = 0,
    targets: NDArray[np.int64] | None = None,
) -> Sample:
    """A Sample in one line."""
    params = SamplingParams(max_tokens, seed, temperature, top_k, top_p, stop_tokens, stop_strings)
    return Sample(
        base,
        weights,
        as_tokens(prompt),
        n,
        params,
        prompt_logprobs,
        topk_prompt,
        topk_sample,
        None if targets is None else Array.of(targets),
    )


def tokens(sequence: SampledSequence) -> list[int]:
    return [int(token) for token in np.frombuffer(sequence.tokens, "<i4")]


def logprobs(sequence: SampledSequence) -> Floats:
    return np.frombuffer(sequence.logprobs, "<f4").astype(np.float32)


def all_tokens(results: list[SampleResult]) -> list[list[int]]:
    return [tokens(sequence) for result in results for sequence in result.sequences]
