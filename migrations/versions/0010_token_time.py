"""Adapters are sorted by time per token too; the recorder fills the column within a minute."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_standing", sa.Column("token_time_p95", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("adapter_standing", "token_time_p95")
