"""The registry's first tables: tenants, keys, adapters, versions, aliases, usage and audit."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", BIG_KEY, nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=True),
        sa.Column("subject", sa.String(length=128), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_table(
        "tenant",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("weight", sa.Float(precision=53), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenant")),
        sa.UniqueConstraint("name", name=op.f("uq_tenant_name")),
    )
    op.create_table(
        "adapter",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("last_version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_adapter_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_adapter_tenant_id_name")),
    )
    op.create_table(
        "api_key",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("hint", sa.String(length=16), nullable=False),
        sa.Column("tenant_id", sa.Integer(), nullable=True),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_api_key_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_key_key_hash")),
        sa.UniqueConstraint("key_id", name=op.f("uq_api_key_key_id")),
        sa.UniqueConstraint("purpose", name=op.f("uq_api_key_purpose")),
    )
    op.create_index(op.f("ix_api_key_tenant_id"), "api_key", ["tenant_id"], unique=False)
    op.create_table(
        "usage",
        sa.Column("id", BIG_KEY, nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.Integer(), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=False),
        sa.Column("queue_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("load_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("prefill_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("decode_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_usage_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage")),
        sa.UniqueConstraint("request_id", name=op.f("uq_usage_request_id")),
    )
    op.create_index(
        op.f("ix_usage_tenant_id_created_at"), "usage", ["tenant_id", "created_at"], unique=False
    )
    op.create_table(
        "adapter_version",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("adapter_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("base_fingerprint", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapter.id"], name=op.f("fk_adapter_version_adapter_id_adapter")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_version")),
        sa.UniqueConstraint(
            "adapter_id", "number", name=op.f("uq_adapter_version_adapter_id_number")
        ),
    )
    op.create_index(op.f("ix_adapter_version_digest"), "adapter_version", ["digest"], unique=False)
    op.create_table(
        "alias",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("adapter_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=31), nullable=False),
        sa.Column("version_id", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapter.id"], name=op.f("fk_alias_adapter_id_adapter")
        ),
        sa.ForeignKeyConstraint(
            ["version_id"], ["adapter_version.id"], name=op.f("fk_alias_version_id_adapter_version")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alias")),
        sa.UniqueConstraint("adapter_id", "name", name=op.f("uq_alias_adapter_id_name")),
    )
    op.create_index(op.f("ix_alias_version_id"), "alias", ["version_id"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_alias_version_id"), table_name="alias")
    op.drop_table("alias")
    op.drop_index(op.f("ix_adapter_version_digest"), table_name="adapter_version")
    op.drop_table("adapter_version")
    op.drop_index(op.f("ix_usage_tenant_id_created_at"), table_name="usage")
    op.drop_table("usage")
    op.drop_index(op.f("ix_api_key_tenant_id"), table_name="api_key")
    op.drop_table("api_key")
    op.drop_table("adapter")
    op.drop_table("tenant")
    op.drop_table("audit")
