"""Graphs that tenants' losses and policies are. The graphs themselves are objects."""

from __future__ import annotations

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy.engine import Connection

from gradserve.store.base import StoredGraph
from gradserve.store.queries.common import matching
from gradserve.store.tables import fields, graphs, insert_if_new

_INSERT = insert_if_new(graphs)


def put(connection: Connection, graph: StoredGraph) -> None:
    """A graph that the tenant has already stays as it is."""
    connection.execute(_INSERT, asdict(graph))


def get(connection: Connection, tenant: str | None, digest: str) -> StoredGraph | None:
    where = matching(graphs, tenant=tenant, digest=digest)
    row = connection.execute(sa.select(*fields(StoredGraph, graphs)).where(*where)).first()
    return None if row is None else StoredGraph(*row)
