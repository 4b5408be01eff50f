"""A module as ONNX (onnx.ai), by torch's own exporter on the interpreter; sizes that vary keep the graph's symbols."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from gradserve.compute.engine.export.module_parity import Outputs, Run
from gradserve.compute.engine.graphs.module import GraphModule
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.exports import CannotExport, ModuleSource
from gradserve.wire import graph as ir

FILE = "model.onnx"
LIBRARIES: tuple[str, ...] = ("onnx", "onnxscript", "onnxruntime")
BOUND = 1e-4
"""Of float32 sums in another order, as for language models; 3e-7 is what small modules differ by."""

_EXAMPLE = 4
"""The size that is traced with; what was specialised to it does not pass as one that varies."""
_LARGEST = 2**24
"""Of a size that varies: products of sizes stay below 2^63, as they do in the interpreter."""
_ONE_FILE_BYTES = 1 << 30
"""Protobuf ends at 2 GiB; larger weights lie in a file beside."""


def require() -> None:
    """Raises CannotExport when the packages are missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise CannotExport("an ONNX export needs more packages: pip install 'gradserve[onnx]'.") from error


def write(source: ModuleSource, graph: ir.Graph, weights: Tensors, folder: Path) -> None:
    """Write the file. Raises CannotExport where torch's exporter can't."""
    inputs = [given for given in graph.inputs if given.kind == "input"]
    try:
        with _quiet():
            program = torch.onnx.export(
                _Called(graph, weights).eval(),
                tuple(_example(given, graph.symbols) for given in inputs),
                dynamo=True,
                verbose=False,
                input_names=[given.name for given in inputs],
                output_names=[output.name for output in graph.outputs],
                dynamic_shapes=(tuple(_varying(given) for given in inputs),),
            )
        assert program is not None
        large = source.weights.stat().st_size > _ONE_FILE_BYTES
        program.save(folder / FILE, external_data=large)
    except Exception as error:  # whatever an exporter of a thousand operators raises
        said = str(error.__cause__ or error).strip().split("\n")[0][:300]
        raise CannotExport(f"torch can't write this module as ONNX: {said}. Use --format safetensors.") from error


def load(graph: ir.Graph, folder: Path) -> Run:
    """The file in onnxruntime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    used = {given.name for given in session.get_inputs()}

    def run(batch: Tensors) -> Outputs:
        given = {name: tensor.numpy() for name, tensor in batch.items() if name in used}
        return dict(zip(names, session.run(None, given), strict=True))

    return run


class _Called(GraphModule):
    """Its inputs in order, its outputs as a tuple: what ONNX has."""

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        result = super().forward(*inputs, **named)
        return tuple(result.values()) if isinstance(result, dict) else (result,)


def _example(given: ir.Input, symbols: list[str]) -> torch.Tensor:
    shape = [_EXAMPLE + symbols.index(size) if isinstance(size, str) else size for size in given.shape]
    return torch.zeros(shape, dtype=torch.float32 if given.dtype == "any" else getattr(torch, given.dtype))


def _varying(given: ir.Input) -> dict[int, Any]:
    return {axis: Dim(size, max=_LARGEST) for axis, size in enumerate(given.shape) if isinstance(size, str)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of packages that are not needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
