"""Roll-ups tell endings that were asked for, and how much of a tenant runs and waits."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name, kind in (
        ("length_asked", sa.Integer()),
        ("running", sa.BigInteger()),
        ("waiting", sa.BigInteger()),
    ):
        op.add_column(
            "traffic_rollup", sa.Column(name, kind, nullable=False, server_default=sa.text("0"))
        )


def downgrade() -> None:
    for name in ("waiting", "running", "length_asked"):
        op.drop_column("traffic_rollup", name)
