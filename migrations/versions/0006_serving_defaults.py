"""How a version is served where a request says nothing else: template, stop tokens, sampling."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_version", sa.Column("serving", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("adapter_version", "serving")
