"""The dashboard: roll-ups of the engine's records, sessions, an index to publishes in the audit."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "adapter_standing",
        sa.Column("span", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("queue_p50", sa.Float(precision=53), nullable=True),
        sa.Column("queue_p95", sa.Float(precision=53), nullable=True),
        sa.Column("queue_p99", sa.Float(precision=53), nullable=True),
        sa.Column("queue_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("load_p95", sa.Float(precision=53), nullable=True),
        sa.Column("ttft_p95", sa.Float(precision=53), nullable=True),
        sa.Column("token_gap_p95", sa.Float(precision=53), nullable=True),
        sa.Column("length_share", sa.Float(precision=53), nullable=True),
        sa.Column("resident_share", sa.Float(precision=53), nullable=True),
        sa.Column("last_request", sa.Float(precision=53), nullable=True),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("span", "tenant", "adapter", name=op.f("pk_adapter_standing")),
    )
    op.create_index(
        op.f("ix_adapter_standing_span_last_request"), "adapter_standing", ["span", "last_request"]
    )
    op.create_table(
        "alert",
        sa.Column("id", BIG_KEY, nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=True),
        sa.Column("adapter", sa.String(length=64), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("began", sa.Float(precision=53), nullable=False),
        sa.Column("ended", sa.Float(precision=53), nullable=True),
        sa.Column("what", sa.String(length=500), nullable=False),
        sa.Column("change", sa.String(length=500), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert")),
    )
    op.create_index(op.f("ix_alert_ended"), "alert", ["ended"])
    op.create_table(
        "engine_rollup",
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("covered", sa.Float(precision=53), nullable=False),
        sa.Column("down", sa.Float(precision=53), nullable=False),
        sa.Column("missed", sa.Integer(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("running", sa.BigInteger(), nullable=False),
        sa.Column("waiting", sa.BigInteger(), nullable=False),
        sa.Column("kv_share", sa.Float(precision=53), nullable=False),
        sa.Column("slots_used", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("adapters", sa.BigInteger(), nullable=False),
        sa.Column("prefill_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_tokens", sa.BigInteger(), nullable=False),
        sa.Column("base_tokens", sa.BigInteger(), nullable=False),
        sa.Column("preemptions", sa.Integer(), nullable=False),
        sa.Column("schedule", sa.Float(precision=53), nullable=False),
        sa.Column("prepare", sa.Float(precision=53), nullable=False),
        sa.Column("forward", sa.Float(precision=53), nullable=False),
        sa.Column("lora", sa.Float(precision=53), nullable=False),
        sa.Column("sample", sa.Float(precision=53), nullable=False),
        sa.Column("post", sa.Float(precision=53), nullable=False),
        sa.Column("sketches", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("width", "start", name=op.f("pk_engine_rollup")),
    )
    op.create_table(
        "recorder_state",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.String(length=32), nullable=False),
        sa.Column("cursor", sa.JSON(), nullable=False),
        sa.Column("flush", sa.BigInteger(), nullable=False),
        sa.Column("complete_until", sa.Float(precision=53), nullable=False),
        sa.Column("missed", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_recorder_state")),
    )
    op.create_table(
        "slot_span",
        sa.Column("id", BIG_KEY, nullable=False),
        sa.Column("slot", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("owners", sa.JSON(), nullable=False),
        sa.Column("began", sa.Float(precision=53), nullable=False),
        sa.Column("ended", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slot_span")),
    )
    op.create_index(op.f("ix_slot_span_began"), "slot_span", ["began"])
    op.create_index(op.f("ix_slot_span_ended"), "slot_span", ["ended"])
    op.create_table(
        "slow_request",
        sa.Column("id", BIG_KEY, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Float(precision=53), nullable=False),
        sa.Column("ended", sa.Float(precision=53), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slow_request")),
    )
    op.create_index(op.f("ix_slow_request_hour"), "slow_request", ["hour"])
    op.create_index(
        op.f("ix_slow_request_tenant_adapter_hour_seconds"),
        "slow_request",
        ["tenant", "adapter", "hour", "seconds"],
    )
    op.create_table(
        "traffic_subject",
        sa.Column("id", BIG_KEY, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_traffic_subject")),
        sa.UniqueConstraint(
            "tenant", "adapter", "version", name=op.f("uq_traffic_subject_tenant_adapter_version")
        ),
    )
    op.create_table(
        "waiting_queue",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("cause", sa.String(length=8), nullable=True),
        sa.Column("waiting", sa.Integer(), nullable=False),
        sa.Column("running", sa.Integer(), nullable=False),
        sa.Column("waits_since", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("tenant", "adapter", "version", name=op.f("pk_waiting_queue")),
    )
    op.create_table(
        "traffic_rollup",
        sa.Column("subject_id", BIG_KEY, nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("good", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("preemptions", sa.Integer(), nullable=False),
        sa.Column("stop", sa.Integer(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("abort", sa.Integer(), nullable=False),
        sa.Column("timeout", sa.Integer(), nullable=False),
        sa.Column("error", sa.Integer(), nullable=False),
        sa.Column("prefill_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_tokens", sa.BigInteger(), nullable=False),
        sa.Column("loads", sa.Integer(), nullable=False),
        sa.Column("quota", sa.Float(precision=53), nullable=False),
        sa.Column("load", sa.Float(precision=53), nullable=False),
        sa.Column("slot", sa.Float(precision=53), nullable=False),
        sa.Column("kv", sa.Float(precision=53), nullable=False),
        sa.Column("budget", sa.Float(precision=53), nullable=False),
        sa.Column("turn", sa.Float(precision=53), nullable=False),
        sa.Column("resident_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("last_request", sa.Float(precision=53), nullable=False),
        sa.Column("refused", sa.JSON(), nullable=False),
        sa.Column("sketches", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["subject_id"],
            ["traffic_subject.id"],
            name=op.f("fk_traffic_rollup_subject_id_traffic_subject"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("subject_id", "width", "start", name=op.f("pk_traffic_rollup")),
    )
    op.create_index(op.f("ix_traffic_rollup_width_start"), "traffic_rollup", ["width", "start"])
    op.create_table(
        "dashboard_session",
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("api_key_id", sa.Integer(), nullable=True),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["api_key_id"],
            ["api_key.id"],
            name=op.f("fk_dashboard_session_api_key_id_api_key"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("token_hash", name=op.f("pk_dashboard_session")),
    )
    op.create_index(op.f("ix_dashboard_session_api_key_id"), "dashboard_session", ["api_key_id"])
    op.create_index(op.f("ix_dashboard_session_expires_at"), "dashboard_session", ["expires_at"])
    op.create_index(op.f("ix_audit_tenant_subject"), "audit", ["tenant", "subject"])


def downgrade() -> None:
    op.drop_index(op.f("ix_audit_tenant_subject"), table_name="audit")
    for table in (
        "dashboard_session", "traffic_rollup", "traffic_subject", "engine_rollup",
        "adapter_standing", "slow_request", "slot_span", "waiting_queue", "alert", "recorder_state",
    ):  # fmt: skip
        op.drop_table(table)
