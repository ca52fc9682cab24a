"""What a tenant may register by reference, with which of the operator's credentials."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenant", sa.Column("sources", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("tenant", "sources")
