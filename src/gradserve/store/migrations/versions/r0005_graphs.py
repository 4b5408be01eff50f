"""Graphs of users (losses, policies), and environment steps in the ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "graphs",
        sa.Column("n", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("n", name="pk_graphs"),
        sa.UniqueConstraint("tenant", "digest", name="uq_graphs_tenant_digest"),
    )
    op.add_column("ledger", sa.Column("env_steps", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("ledger") as batch:
        batch.drop_column("env_steps")
    op.drop_table("graphs")
