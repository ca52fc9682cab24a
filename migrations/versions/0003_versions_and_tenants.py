"""Canaries, stored replies, the keys' last use, suspended and deleted tenants; indexes of lists."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.add_column("tenant", sa.Column("suspended_at", TIME, nullable=True))
    op.add_column("tenant", sa.Column("deleted_at", TIME, nullable=True))
    op.add_column("api_key", sa.Column("last_used_at", TIME, nullable=True))
    with op.batch_alter_table("alias") as alias:
        alias.add_column(sa.Column("canary_version_id", sa.Integer(), nullable=True))
        alias.add_column(sa.Column("canary_share", sa.Float(precision=53), nullable=True))
        alias.create_foreign_key(
            op.f("fk_alias_canary_version_id_adapter_version"),
            "adapter_version",
            ["canary_version_id"],
            ["id"],
        )
        alias.create_index(op.f("ix_alias_canary_version_id"), ["canary_version_id"])
    op.create_table(
        "stored_reply",
        sa.Column("id", BIG_KEY, nullable=False),
        sa.Column("tenant_id", sa.Integer(), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("request_hash", sa.String(length=64), nullable=False),
        sa.Column("reply", sa.JSON(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_stored_reply_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stored_reply")),
        sa.UniqueConstraint(
            "tenant_id", "key_hash", name=op.f("uq_stored_reply_tenant_id_key_hash")
        ),
    )
    op.create_index(op.f("ix_stored_reply_created_at"), "stored_reply", ["created_at"])
    op.create_index(op.f("ix_audit_tenant_id"), "audit", ["tenant", "id"])
    kept = sa.text("residency <> 'auto'")
    op.create_index(
        op.f("ix_adapter_residency"), "adapter", ["residency"],
        sqlite_where=kept, postgresql_where=kept,
    )  # fmt: skip


def downgrade() -> None:
    op.drop_index(op.f("ix_adapter_residency"), table_name="adapter")
    op.drop_index(op.f("ix_audit_tenant_id"), table_name="audit")
    op.drop_index(op.f("ix_stored_reply_created_at"), table_name="stored_reply")
    op.drop_table("stored_reply")
    with op.batch_alter_table("alias") as alias:
        alias.drop_index(op.f("ix_alias_canary_version_id"))
        alias.drop_constraint(
            op.f("fk_alias_canary_version_id_adapter_version"), type_="foreignkey"
        )
        alias.drop_column("canary_share")
        alias.drop_column("canary_version_id")
    op.drop_column("api_key", "last_used_at")
    op.drop_column("tenant", "deleted_at")
    op.drop_column("tenant", "suspended_at")
