"""The parts that all nouns share: the tenant's door and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gradserve.store.base import Page
from gradserve.store.tables import fields


class _Owned(Protocol):
    @property
    def tenant(self) -> str: ...


OwnedT = TypeVar("OwnedT", bound=_Owned)
StructT = TypeVar("StructT", bound=msgspec.Struct)


def visible(row: OwnedT | None, tenant: str | None) -> OwnedT | None:
    """The door to single rows: another tenant's is as if it did not exist. ``tenant`` None is the server itself."""
    if row is None or (tenant is not None and row.tenant != tenant):
        return None
    return row


def matching(table: sa.Table, **wanted: str | None) -> list[sa.ColumnElement[bool]]:
    """The door to many rows: column == value for each value that is given."""
    return [table.c[name] == value for name, value in wanted.items() if value is not None]


def page_of(
    connection: Connection,
    struct: type[StructT],
    table: sa.Table,
    where: Sequence[sa.ColumnElement[bool]],
    order: Sequence[sa.UnaryExpression[Any] | sa.Column[Any]],
    limit: int,
    offset: int,
) -> tuple[list[StructT], Page]:
    """One page of the rows that match, and how many there are in all."""
    total = connection.execute(sa.select(sa.func.count()).select_from(table).where(*where)).scalar_one()
    rows = connection.execute(
        sa.select(*fields(struct, table)).where(*where).order_by(*order).limit(limit).offset(offset)
    )
    return [struct(*row) for row in rows], Page(offset=offset, limit=limit, total=total)


def newest_first(table: sa.Table) -> list[sa.UnaryExpression[Any]]:
    """By creation; the order of writing decides between equal times, so that pages never overlap."""
    return [table.c.created_at.desc(), table.c.n.desc()]
