"""The vllm sampler against the real vLLM: run by `make vllm`, in an environment that has it.

Tiny random models of every family; the trainer's log-probs, in the same process, are the right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gradserve.compute.catalog import FAMILIES
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.vllm_engine import VllmEngine
from gradserve.compute.engine.vllm_sampler import VllmSampler
from gradserve.compute.tasks import Done, Failed, SampleTask
from gradserve.wire.ops import Sample
from tests.models import build_tiny
from tests.numerics.lab import Lab, all_tokens, ask, floats, ids, logprobs, row, sample_of, tokens

ATOL = 5e-5
"""|log-prob of vLLM - log-prob of the trainer| on the tiny models, float32."""

CONTEXT = 256
KV_BYTES = 1 << 26
RANK = 8
END = 319


class Real:
    """A lab whose sampler is vLLM."""

    def __init__(self, root: Path, model: Path, most_adapters: int = 4) -> None:
        self.told: list[str] = []
        self.lab = Lab(root / "objects", {"m": model})

        def start(base: Base) -> VllmEngine:
            return VllmEngine(str(model), base.context, KV_BYTES, 512, RANK, most_adapters)

        self.sampler = VllmSampler("m", self.lab.bases, self.lab.arrays, start, root / "f", RANK, self.told.append)

    def sample(self, ops: list[Sample]) -> list[Done]:
        return self.lab.sample_tasks(ops, self.sampler)
