"""What a worker computes with: device, number format and kernels, from what its spec asks for."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from gradserve.compute.catalog import ModelUnusable
from gradserve.compute.engine.invariant import BatchInvariant
from gradserve.compute.engine.kernels import FAST, Kernels
from gradserve.compute.tasks import WorkerSpec

WORTH_IT = 1.5
"""How much faster than float32 a half precision must multiply before "auto" takes it: it costs accuracy."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Machine:
    """``dtype`` is that of base weights and activations; adapters and moments are float32 always."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels

    @classmethod
    def of(cls, spec: WorkerSpec) -> Machine:
        """Resolves "auto". Sets torch's threads. Raises ModelUnusable for what this machine cannot do."""
        torch.set_num_threads(spec.threads)
        if spec.numerics == "batch_invariant":
            return cls(torch.device("cpu"), torch.float32, BatchInvariant())
        device = _device(spec.device)
        dtype = fastest_dtype(device) if spec.dtype == "auto" else _DTYPES[spec.dtype]
        return cls(device, dtype, FAST if device.type == "cpu" else _cuda_kernels())


def _cuda_kernels() -> Kernels:
    from gradserve.compute.engine.cuda import Cuda  # its imports would lengthen the start of every CPU worker

    return Cuda()


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelUnusable('device = "cuda", but torch sees no CUDA device here: set device = "cpu" or "auto"')
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where it multiplies at least WORTH_IT times as fast as float32 (GPUs; CPUs with AMX), else float32.

    CPUs without such units convert: on AVX2, bfloat16 ran at a seventh of float32's rate.
    """
    single, half = _seconds(device, torch.float32), _seconds(device, torch.bfloat16)
    return torch.bfloat16 if half * WORTH_IT < single else torch.float32


def _seconds(device: torch.device, dtype: torch.dtype) -> float:
    """The best of three products of [256, 1024] and [1024, 1024]."""
    x, weight = torch.ones(256, 1024, device=device, dtype=dtype), torch.ones(1024, 1024, device=device, dtype=dtype)
    times = []
    for _ in range(4):  # the first one warms up
        began = time.perf_counter()
        torch.mm(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
