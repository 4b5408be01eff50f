"""The export of a module's checkpoint: write, load as others would, compare with the interpreter, stamp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from gradserve.compute.checkpoints import pretty
from gradserve.compute.engine import tensorfile
from gradserve.compute.engine.export import module_folder, module_parity, onnx_file
from gradserve.compute.engine.export.module_parity import Run
from gradserve.compute.engine.export.parity import CPU
from gradserve.compute.engine.export.placing import place, refuse_existing, versions_of
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.exports import STAMP, CannotExport, ExportedModule, ModuleFormat, ModuleSource, module_stamp
from gradserve.wire import graph as ir
from gradserve.wire.errors import Invalid


class _Writer(Protocol):
    """A format: a module with these names. ``BOUND`` is of a difference, relative where values exceed 1."""

    BOUND: float
    LIBRARIES: tuple[str, ...]

    def require(self) -> None: ...
    def write(self, source: ModuleSource, graph: ir.Graph, weights: Tensors, folder: Path) -> None: ...
    def load(self, graph: ir.Graph, folder: Path) -> Run: ...


WRITERS: dict[ModuleFormat, _Writer] = {"safetensors": module_folder, "onnx": onnx_file}


def export(
    source: ModuleSource, to: Path, format: ModuleFormat, tell: Callable[[str], None] = lambda _: None
) -> ExportedModule:
    """Write ``source`` to the folder ``to``; one that fails the parity check is kept as ``<to>.failed-parity``.

    ``tell`` hears about steps that take long. Nothing is left behind when an exception ends it. Raises CannotExport.
    """
    refuse_existing(to)
    writer = WRITERS[format]
    writer.require()
    try:
        graph = ir.decode(source.graph)
        weights, _ = tensorfile.load(source.weights, CPU)
        batches = module_parity.batches(graph, weights)
        expected = module_parity.by_interpreter(graph, weights, batches)
    except Invalid as error:
        raise CannotExport(f"gradserve's own interpreter can't run {source.path}: {error.detail}") from error

    def fill(folder: Path) -> ExportedModule:
        tell(f"writing {format}")
        writer.write(source, graph, weights, folder)
        tell("computing again from what was written")
        found = [writer.load(graph, folder)(batch) for batch in batches]
        result = ExportedModule(folder, module_parity.compare(expected, found, writer.BOUND))
        stamp = module_stamp(source, format, result, versions_of("gradserve", "torch", *writer.LIBRARIES))
        (folder / STAMP).write_bytes(pretty(stamp))
        return result

    return place(to, fill)
