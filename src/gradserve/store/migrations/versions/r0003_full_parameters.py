"""Runs and checkpoints without adapters: all parameters of the base are trained."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLES = ("runs", "checkpoints")


def upgrade() -> None:
    for table in TABLES:
        with op.batch_alter_table(table) as batch:
            batch.alter_column("lora", existing_type=sa.Text(), nullable=True)


def downgrade() -> None:
    for table in TABLES:
        op.execute(sa.delete(sa.table(table, sa.column("lora"))).where(sa.column("lora").is_(None)))
        with op.batch_alter_table(table) as batch:
            batch.alter_column("lora", existing_type=sa.Text(), nullable=False)
