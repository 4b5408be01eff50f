"""Whether a module's artefact computes what gradserve's interpreter computes: the same seeded inputs through both."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradserve.compute.engine.graphs.executable import Executable, dtype_of
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.exports import ModuleParity
from gradserve.wire import graph as ir
from gradserve.wire.errors import Invalid

Outputs = dict[str, NDArray[np.generic]]
Run = Callable[[Tensors], Outputs]
"""A loaded artefact: a batch of inputs by name -> its outputs by name."""

SIZES = (1, 2, 5)
"""Of the batch. Programs that took the size of their example for a constant fail at another."""

LARGEST = 255
"""Of integers that are drawn."""


def batches(graph: ir.Graph, weights: Mapping[str, Tensor]) -> list[Tensors]:
    """Inputs of SIZES, seeded: normal floats, and integers from 0 to the largest that the graph takes (LARGEST)."""
    executable = Executable(graph, max_constant_bytes=ir.MAX_BYTES)
    return [_batch(executable, size, weights) for size in SIZES]


def by_interpreter(graph: ir.Graph, weights: Mapping[str, Tensor], inputs: list[Tensors]) -> list[Outputs]:
    """What the checkpoint gives. Raises Invalid when it can't be run."""
    executable = Executable(graph, max_constant_bytes=ir.MAX_BYTES)
    return [arrays(_run(executable, weights, batch)) for batch in inputs]


def arrays(outputs: Mapping[str, Tensor]) -> Outputs:
    """Tensors as arrays."""
    return {name: value.detach().numpy() for name, value in outputs.items()}


def compare(expected: list[Outputs], found: list[Outputs], bound: float) -> ModuleParity:
    """The figures; an output that one of them lacks, or of another shape, differs infinitely."""
    differences = {
        name: max(_difference(one[name], other.get(name)) for one, other in zip(expected, found, strict=True))
        for name in expected[0]
    }
    return ModuleParity(differences, list(SIZES), bound)


def _difference(expected: NDArray[np.generic], found: NDArray[np.generic] | None) -> float:
    if found is None or found.shape != expected.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    wanted, given = expected.astype(np.float64), found.astype(np.float64)
    same = (wanted == given) | (np.isnan(wanted) & np.isnan(given))  # also infinities
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)
    return float(np.where(same, 0.0, np.abs(wanted - given) / largest).max())


def _batch(executable: Executable, size: int, weights: Mapping[str, Tensor]) -> Tensors:
    generator = torch.Generator().manual_seed(size)
    sizes = {symbol: size + number for number, symbol in enumerate(executable.graph.symbols)}
    inputs = [given for given in executable.graph.inputs if given.kind == "input"]
    zeros = {given.name: _zeros(given, sizes) for given in inputs}
    return {name: _drawn(executable, name, zeros, weights, generator) for name in zeros}


def _zeros(given: ir.Input, sizes: dict[str, int]) -> Tensor:
    shape = [sizes[size] if isinstance(size, str) else size for size in given.shape]
    return torch.zeros(shape, dtype=torch.float32 if given.dtype == "any" else dtype_of(given.dtype))


def _drawn(
    executable: Executable, name: str, zeros: Tensors, weights: Mapping[str, Tensor], generator: torch.Generator
) -> Tensor:
    zero = zeros[name]
    if zero.is_floating_point():
        return torch.randn(zero.shape, generator=generator).to(zero.dtype)
    limit = 2 if zero.dtype == torch.bool else _limit(executable, name, zeros, weights)
    return torch.randint(limit, zero.shape, generator=generator).to(zero.dtype)


def _limit(executable: Executable, name: str, zeros: Tensors, weights: Mapping[str, Tensor]) -> int:
    """How many integers from 0 the graph takes for an input, by powers of two: tables have an end."""
    limit = LARGEST + 1 if zeros[name].dtype.itemsize > 1 else 128
    while limit > 1 and not _takes(executable, zeros | {name: torch.full_like(zeros[name], limit - 1)}, weights):
        limit //= 2
    return limit


def _takes(executable: Executable, inputs: Tensors, weights: Mapping[str, Tensor]) -> bool:
    try:
        _run(executable, weights, inputs)
    except Invalid:
        return False
    return True


@torch.no_grad()
def _run(executable: Executable, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensors:
    return executable.run({**weights, **inputs})
