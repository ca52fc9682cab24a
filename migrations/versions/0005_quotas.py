"""What a tenant may use, and how long the engine worked for a request; an index for all usage."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenant", sa.Column("quota", sa.JSON(), nullable=True))
    op.add_column(
        "usage",
        sa.Column("engine_seconds", sa.Float(precision=53), server_default="0", nullable=False),
    )
    op.create_index(op.f("ix_usage_created_at"), "usage", ["created_at"])


def downgrade() -> None:
    op.drop_index(op.f("ix_usage_created_at"), table_name="usage")
    op.drop_column("usage", "engine_seconds")
    op.drop_column("tenant", "quota")
