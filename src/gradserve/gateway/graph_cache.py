"""Graphs that were read before."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from gradserve.wire.graph import Graph

_REMEMBERED: Final = 256


class GraphCache:
    """The newest graphs by (tenant, digest). A graph never changes."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], Graph] = OrderedDict()

    def get(self, tenant: str, digest: str) -> Graph | None:
        """What ``put`` was given, if it is still here."""
        found = self._kept.get((tenant, digest))
        if found is not None:
            self._kept.move_to_end((tenant, digest))
        return found

    def put(self, tenant: str, digest: str, graph: Graph) -> None:
        """Remember a graph that the tenant has in the store."""
        self._kept[tenant, digest] = graph
        if len(self._kept) > _REMEMBERED:
            self._kept.popitem(last=False)
