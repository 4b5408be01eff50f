"""The tables of the first version."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("n", NUMBER, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("lora", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("moments", sa.Text(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("n", name="pk_checkpoints"),
        sa.UniqueConstraint("run_id", "kind", "name", name="uq_checkpoints_run_id_kind_name"),
    )
    op.create_index("ix_checkpoints_expires_at", "checkpoints", ["expires_at"])
    op.create_index("ix_checkpoints_run_id_tenant_created_at", "checkpoints", ["run_id", "tenant", "created_at"])
    op.create_index("ix_checkpoints_tenant_created_at", "checkpoints", ["tenant", "created_at"])
    op.create_table(
        "ledger",
        sa.Column("n", NUMBER, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("op_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("train_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prefill_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("sample_tokens", sa.BigInteger(), nullable=False),
        sa.Column("compute_ms", sa.Text(), nullable=False),
        sa.Column("amount_usd", sa.Text(), nullable=False),
        sa.Column("price_version", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("n", name="pk_ledger"),
        sa.UniqueConstraint("id", name="uq_ledger_id"),
    )
    op.create_index("ix_ledger_run_id_tenant_n", "ledger", ["run_id", "tenant", "n"])
    op.create_index("ix_ledger_session_id_tenant_n", "ledger", ["session_id", "tenant", "n"])
    op.create_index("ix_ledger_tenant_n", "ledger", ["tenant", "n"])
    op.create_table(
        "op_bodies",
        sa.Column("n", NUMBER, nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("n", name="pk_op_bodies"),
    )
    op.create_table(
        "ops",
        sa.Column("n", NUMBER, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("price_version", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("body_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("content_type", sa.Text(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("n", name="pk_ops"),
        sa.UniqueConstraint("id", name="uq_ops_id"),
        sa.UniqueConstraint("scope", "seq", name="uq_ops_scope_seq"),
    )
    op.create_index("ix_ops_state_ended_at", "ops", ["state", "ended_at"])
    op.create_table(
        "runs",
        sa.Column("n", NUMBER, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("lora", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_request_at", sa.Double(), nullable=False),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("weights", sa.Text(), nullable=True),
        sa.Column("moments", sa.Text(), nullable=True),
        sa.Column("gradients", sa.Text(), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("corrupted", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("n", name="pk_runs"),
        sa.UniqueConstraint("id", name="uq_runs_id"),
    )
    op.create_index("ix_runs_created_at", "runs", ["created_at"])
    op.create_index("ix_runs_session_id", "runs", ["session_id"])
    op.create_index("ix_runs_tenant_created_at", "runs", ["tenant", "created_at"])
    op.create_table(
        "sampling_sessions",
        sa.Column("n", NUMBER, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("weights", sa.Text(), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("run_version", sa.BigInteger(), nullable=True),
        sa.Column("model_path", sa.Text(), nullable=True),
        sa.Column("clones", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("n", name="pk_sampling_sessions"),
        sa.UniqueConstraint("id", name="uq_sampling_sessions_id"),
    )
    op.create_index("ix_sampling_sessions_session_id", "sampling_sessions", ["session_id"])
    op.create_table(
        "sessions",
        sa.Column("n", NUMBER, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=True),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.Column("finished", sa.Text(), nullable=True),
        sa.Column("finish_detail", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("n", name="pk_sessions"),
        sa.UniqueConstraint("id", name="uq_sessions_id"),
    )
    op.create_index("ix_sessions_tenant_created_at", "sessions", ["tenant", "created_at"])


def downgrade() -> None:
    op.drop_table("sessions")
    op.drop_table("sampling_sessions")
    op.drop_table("runs")
    op.drop_table("ops")
    op.drop_table("op_bodies")
    op.drop_table("ledger")
    op.drop_table("checkpoints")
