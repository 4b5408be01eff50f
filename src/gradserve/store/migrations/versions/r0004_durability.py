"""Durable versions, metrics, events, the server's lease; a run's parent and its client's own state."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

NEW_COLUMNS = (("runs", "parent"), ("runs", "client_state"), ("checkpoints", "client_state"))


def _text(name: str, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def _count(name: str, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def _time(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=False)


def _table(name: str, *columns: sa.Column[Any]) -> None:
    number = sa.Column("n", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False)
    op.create_table(name, number, *columns, sa.PrimaryKeyConstraint("n", name=f"pk_{name}"))


def upgrade() -> None:
    for table, column in NEW_COLUMNS:
        op.add_column(table, _text(column, nullable=True))
    _table(
        "versions",
        _text("run_id"),
        _text("tenant"),
        _count("version"),
        _count("seq"),
        _text("weights"),
        _text("moments", nullable=True),
        _text("cause"),
        _count("size_bytes"),
        _time("created_at"),
        _text("manifest"),
    )
    op.create_index("ix_versions_run_id_n", "versions", ["run_id", "n"])
    _table(
        "run_metrics",
        _text("run_id"),
        _text("tenant"),
        _count("seq"),
        _count("version"),
        _text("kind"),
        _time("at"),
        _text("values"),
    )
    op.create_index("ix_run_metrics_run_id_n", "run_metrics", ["run_id", "n"])
    _table(
        "events",
        _time("at"),
        _text("kind"),
        _text("detail"),
        _text("tenant", nullable=True),
        _text("run_id", nullable=True),
        _count("seq", nullable=True),
    )
    op.create_index("ix_events_run_id_n", "events", ["run_id", "n"])
    op.create_index("ix_events_tenant_n", "events", ["tenant", "n"])
    _table("leases", _text("name"), _count("epoch"), _text("holder"), _time("taken_at"))
    with op.batch_alter_table("leases") as batch:
        batch.create_unique_constraint("uq_leases_name", ["name"])


def downgrade() -> None:
    for table in ("leases", "events", "run_metrics", "versions"):
        op.drop_table(table)
    for table, column in reversed(NEW_COLUMNS):
        with op.batch_alter_table(table) as batch:
            batch.drop_column(column)
