"""Graphs of users as things that run: read from the object store, checked, kept by digest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor

from gradserve.compute.engine.arrays import Arrays
from gradserve.compute.engine.graphs.cost import measure
from gradserve.compute.engine.graphs.executable import Executable
from gradserve.wire import graph as ir
from gradserve.wire.errors import Invalid

MODULE_CONSTANT_BYTES = 4 << 20
"""Of all constants of a module's graph together; a graph's text bounds them anyway."""
_KEPT = 64
_KEPT_SIZES = 256


class BoundedGraph:
    """A graph that runs only on sizes at which a dry run found that it takes no more than it may."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.executable = Executable(graph, max_constant_bytes=MODULE_CONSTANT_BYTES)
        self._allowed: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def check(self, values: Mapping[str, Tensor]) -> None:
        """Raises Invalid when the values' shapes do not fit, or a run with them would take too much.

        Looked at are the next powers of two, so that ragged batches share a dry run; only what is too large there is
        looked at exactly.
        """
        sizes = self._sizes(values)
        rounded = {symbol: 1 << max(size - 1, 0).bit_length() for symbol, size in sizes.items()}
        key = tuple(rounded.get(symbol, 1) for symbol in self.graph.symbols)
        if key in self._allowed:
            return
        try:
            measure(self.executable, rounded)
        except Invalid:
            measure(self.executable, sizes)
            return
        self._allowed[key] = None
        if len(self._allowed) > _KEPT_SIZES:
            self._allowed.popitem(last=False)

    def _sizes(self, values: Mapping[str, Tensor]) -> dict[str, int]:
        """What the graph's symbols are for these values."""
        sizes: dict[str, int] = {}
        for given in self.graph.inputs:
            shape = list(values[given.name].shape)
            if not given.fits(shape, sizes):
                raise Invalid(
                    "bad_shape",
                    f"{given.name!r} has shape {shape}; the graph {self.graph.name!r} takes {given.shape}.",
                    field=given.name,
                )
        return sizes

    def try_out(self) -> None:
        """Raises Invalid when the graph would not run at all: a dry run with small sizes, no two alike."""
        measure(self.executable, {symbol: 2 + number for number, symbol in enumerate(self.graph.symbols)})


class GraphStore:
    """Belongs to one worker. What is kept is a cache: dropping any of it changes no result."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._kept: OrderedDict[str, BoundedGraph] = OrderedDict()

    def get(self, digest: str) -> BoundedGraph:
        """The graph of this digest. Raises ObjectMissing, ObjectCorrupt, Invalid."""
        found = self._kept.get(digest)
        if found is None:
            found = self._kept[digest] = BoundedGraph(ir.decode(self._arrays.document(digest)))
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(digest)
        return found
