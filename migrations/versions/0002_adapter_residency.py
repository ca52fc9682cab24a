"""Where an adapter is kept: pinned to a slot, warm in host memory, or as its use demands."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "adapter",
        sa.Column("residency", sa.String(length=8), server_default="auto", nullable=False),
    )


def downgrade() -> None:
    op.drop_column("adapter", "residency")
