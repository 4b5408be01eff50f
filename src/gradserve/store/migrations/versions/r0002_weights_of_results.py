"""Results say which weights they were computed with."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ops", sa.Column("weights", sa.Text(), nullable=True))
    op.add_column("ops", sa.Column("version", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("ops", "version")
    op.drop_column("ops", "weights")
