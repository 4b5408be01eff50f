"""The tables. Columns carry the names of the structs' fields in store/base.py; what goes beyond them is said here.

``n`` numbers the rows of a table in the order they were written. Ops keep their bodies in a table apart: SQLite
writes the whole row when any column changes, and ending an Op must not copy a body of megabytes.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from gradserve.wire.errors import Problem
from gradserve.wire.ops import LoraConfig


class Json(TypeDecorator[Any]):
    """A value of ``kind`` as JSON text, readable in any SQL shell."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self._decoder = msgspec.json.Decoder(kind)

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else self._decoder.decode(value)


class Exact(TypeDecorator[Decimal]):
    """A Decimal as text, digit for digit: SQL's own numbers are floats in SQLite."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Decimal | None:
        return None if value is None else Decimal(value)


metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _number() -> sa.Column[int]:
    # Only a plain INTEGER primary key is SQLite's own row number.
    return sa.Column("n", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True)


def _text(name: str, *, optional: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=optional)


def _time(name: str, *, optional: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=optional)


def _count(name: str, *, optional: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=optional)


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean, nullable=False)


def _json(name: str, kind: Any, *, optional: bool = False) -> sa.Column[Any]:
    return sa.Column(name, Json(kind), nullable=optional)


def _exact(name: str) -> sa.Column[Decimal]:
    return sa.Column(name, Exact, nullable=False)


sessions = sa.Table(
    "sessions",
    metadata,
    _number(),
    _text("id"),
    _text("tenant"),
    _time("created_at"),
    _time("last_seen_at"),
    _text("display_name", optional=True),
    _text("project_id", optional=True),
    _json("tags", tuple[str, ...]),
    _json("user_metadata", dict[str, str]),
    _text("finished", optional=True),
    _text("finish_detail", optional=True),
    sa.UniqueConstraint("id"),
    sa.Index(None, "tenant", "created_at"),
)

runs = sa.Table(
    "runs",
    metadata,
    _number(),
    _text("id"),
    _text("tenant"),
    _text("session_id"),
    _text("base"),
    _json("lora", LoraConfig, optional=True),
    _time("created_at"),
    _time("last_request_at"),
    _json("user_metadata", dict[str, str]),
    _count("version"),
    _text("weights", optional=True),
    _text("moments", optional=True),
    _json("gradients", tuple[tuple[int, str], ...]),
    _count("cursor"),
    _flag("corrupted"),
    _text("parent", optional=True),
    _text("client_state", optional=True),
    sa.UniqueConstraint("id"),
    sa.Index(None, "tenant", "created_at"),
    sa.Index(None, "created_at"),
    sa.Index(None, "session_id"),
)

sampling_sessions = sa.Table(
    "sampling_sessions",
    metadata,
    _number(),
    _text("id"),
    _text("tenant"),
    _text("session_id"),
    _text("base"),
    _time("created_at"),
    _text("weights", optional=True),
    _text("run_id", optional=True),
    _count("run_version", optional=True),
    _text("model_path", optional=True),
    _count("clones"),
    sa.UniqueConstraint("id"),
    sa.Index(None, "session_id"),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    _number(),
    _text("run_id"),
    _text("tenant"),
    _text("kind"),
    _text("name"),
    _text("base"),
    _json("lora", LoraConfig, optional=True),
    _count("version"),
    _text("weights"),
    _text("moments", optional=True),
    _count("size_bytes"),
    _time("created_at"),
    _time("expires_at", optional=True),
    _flag("public"),
    _json("user_metadata", dict[str, str]),
    _text("client_state", optional=True),
    sa.UniqueConstraint("run_id", "kind", "name"),
    sa.Index(None, "tenant", "created_at"),
    sa.Index(None, "run_id", "tenant", "created_at"),
    sa.Index(None, "expires_at"),
)

# ``body_sha256`` tells a replay from another request after the body is gone; it is empty for a rejected Op, which
# any body replays. ``result`` stands behind them, so that the columns before it are read without walking through it;
# ``weights`` and ``version`` are only ever read with it.
ops = sa.Table(
    "ops",
    metadata,
    _number(),
    _text("id"),
    _text("tenant"),
    _text("session_id"),
    _text("scope"),
    _count("seq"),
    _text("kind"),
    _time("accepted_at"),
    _text("run_id", optional=True),
    _text("price_version"),
    _text("state"),
    _time("ended_at", optional=True),
    sa.Column("body_sha256", sa.LargeBinary, nullable=False),
    _text("content_type", optional=True),
    _json("problem", Problem, optional=True),
    sa.Column("result", sa.LargeBinary, nullable=True),
    _text("weights", optional=True),
    _count("version", optional=True),
    sa.UniqueConstraint("id"),
    sa.UniqueConstraint("scope", "seq"),
    sa.Index(None, "state", "ended_at"),
)

# ``n`` is that of the Op. An Op without a body, or with an expired one, has no row here.
op_bodies = sa.Table(
    "op_bodies",
    metadata,
    _number(),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

ledger = sa.Table(
    "ledger",
    metadata,
    _number(),
    _text("id"),
    _text("op_id"),
    _text("tenant"),
    _text("kind"),
    _text("base"),
    _text("run_id", optional=True),
    _text("session_id"),
    _count("seq"),
    _count("train_tokens"),
    _count("prefill_tokens"),
    _count("cached_tokens"),
    _count("sample_tokens"),
    _exact("compute_ms"),
    _exact("amount_usd"),
    _text("price_version"),
    _time("at"),
    sa.Column("env_steps", sa.BigInteger, nullable=False, server_default="0"),
    sa.UniqueConstraint("id"),
    sa.Index(None, "tenant", "n"),
    # Run and session before tenant: of two usable indexes SQLite then takes the narrower one.
    sa.Index(None, "run_id", "tenant", "n"),
    sa.Index(None, "session_id", "tenant", "n"),
)


versions = sa.Table(
    "versions",
    metadata,
    _number(),
    _text("run_id"),
    _text("tenant"),
    _count("version"),
    _count("seq"),
    _text("weights"),
    _text("moments", optional=True),
    _text("cause"),
    _count("size_bytes"),
    _time("created_at"),
    _text("manifest"),
    sa.Index(None, "run_id", "n"),
)

run_metrics = sa.Table(
    "run_metrics",
    metadata,
    _number(),
    _text("run_id"),
    _text("tenant"),
    _count("seq"),
    _count("version"),
    _text("kind"),
    _time("at"),
    _json("values", dict[str, float]),
    sa.Index(None, "run_id", "n"),
)

events = sa.Table(
    "events",
    metadata,
    _number(),
    _time("at"),
    _text("kind"),
    _text("detail"),
    _text("tenant", optional=True),
    _text("run_id", optional=True),
    _count("seq", optional=True),
    sa.Index(None, "run_id", "n"),
    sa.Index(None, "tenant", "n"),
)

# The graphs are objects, named by ``digest``; here it says whose they are. They are small and kept for ever.
graphs = sa.Table(
    "graphs",
    metadata,
    _number(),
    _text("tenant"),
    _text("digest"),
    _text("name"),
    _count("size_bytes"),
    _time("created_at"),
    sa.UniqueConstraint("tenant", "digest"),
)

# Whose database this is: every server that opens it counts ``epoch`` up, and writes only while it is still its own.
leases = sa.Table(
    "leases",
    metadata,
    _number(),
    _text("name"),
    _count("epoch"),
    _text("holder"),
    _time("taken_at"),
    sa.UniqueConstraint("name"),
)


def fields(struct: type[msgspec.Struct], table: sa.Table) -> list[sa.Column[Any]]:
    """The columns that make up ``struct``, in the order of its fields: ``struct(*row)`` reads a row of them."""
    return [table.c[name] for name in struct.__struct_fields__]


def insert_if_new(table: sa.Table) -> sa.Executable:
    """An INSERT that writes nothing when any unique key is taken; it returns ``n``, or no row."""
    return sqlite.insert(table).on_conflict_do_nothing().returning(table.c.n)
