"""The registry's tables. Rows never leave this package; `records.py` has what callers see.

Primary keys are integers and stay inside; what people see are names, version numbers and key ids.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class UtcDateTime(TypeDecorator[datetime]):
    """An aware time, stored in UTC. SQLite keeps no zone: what it returns is marked as UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC; a naive time is a mistake of the caller."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Mark a naive time as UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Parent of all tables. Constraints are named, so that migrations can name them too."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own convention
        datetime: UtcDateTime(),
        dict[str, Any]: JSON(),
        list[str]: JSON(),
        float: Float(53),
    }


# SQLite numbers rows by itself only where the column is exactly INTEGER.
BIG_KEY = BigInteger().with_variant(Integer, "sqlite")


class Tenant(Base):
    """Who owns adapters and keys.

    A deleted tenant's row stays while there is usage of it, and keeps the name: what was used under
    it is nobody else's.
    """

    __tablename__ = "tenant"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    weight: Mapped[float]
    created_at: Mapped[datetime]
    suspended_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    quota: Mapped[dict[str, Any] | None]
    sources: Mapped[dict[str, Any] | None]
    """The credential's name, or null, by the source that it may use."""


class ApiKey(Base):
    """A key, by the SHA-256 of its text. Revoked keys stay, so that their ids keep their meaning.

    `purpose` is unique: it marks the one admin key that the service makes for itself.
    """

    __tablename__ = "api_key"

    id: Mapped[int] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(String(32), unique=True)
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    hint: Mapped[str] = mapped_column(String(16))
    tenant_id: Mapped[int | None] = mapped_column(ForeignKey("tenant.id"), index=True)
    scopes: Mapped[list[str]]
    purpose: Mapped[str | None] = mapped_column(String(32), unique=True)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class Adapter(Base):
    """A name of a tenant, and the last version number it ever gave out.

    The row outlives a delete (`deleted_at`), because numbers are never given out twice.
    """

    __tablename__ = "adapter"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        # Hardly any are kept resident, and they are asked for again and again.
        Index(
            None, "residency",
            sqlite_where=text("residency <> 'auto'"),
            postgresql_where=text("residency <> 'auto'"),
        ),
    )  # fmt: skip

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"))
    name: Mapped[str] = mapped_column(String(64))
    last_version: Mapped[int]
    residency: Mapped[str] = mapped_column(String(8), server_default="auto")
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class AdapterVersion(Base):
    """An immutable upload. Its files are the blob `digest`, which other versions may share."""

    __tablename__ = "adapter_version"
    __table_args__ = (UniqueConstraint("adapter_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapter.id"))
    number: Mapped[int]
    digest: Mapped[str] = mapped_column(String(64), index=True)
    state: Mapped[str] = mapped_column(String(16))
    rank: Mapped[int]
    bytes: Mapped[int] = mapped_column(BigInteger)
    config: Mapped[dict[str, Any]]
    report: Mapped[dict[str, Any]]
    serving: Mapped[dict[str, Any] | None]
    base_fingerprint: Mapped[str] = mapped_column(String(128))
    created_at: Mapped[datetime]


class Alias(Base):
    """A movable name of a version. The database itself refuses to lose a version it points to.

    The share of its requests that is the canary's goes to the canary's version.
    """

    __tablename__ = "alias"
    __table_args__ = (UniqueConstraint("adapter_id", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapter.id"))
    name: Mapped[str] = mapped_column(String(31))
    version_id: Mapped[int] = mapped_column(ForeignKey("adapter_version.id"), index=True)
    canary_version_id: Mapped[int | None] = mapped_column(
        ForeignKey("adapter_version.id"), index=True
    )
    canary_share: Mapped[float | None]
    updated_at: Mapped[datetime]


class StoredReply(Base):
    """The answer to a call that named an `Idempotency-Key`, for calls that repeat it."""

    __tablename__ = "stored_reply"
    __table_args__ = (UniqueConstraint("tenant_id", "key_hash"),)

    id: Mapped[int] = mapped_column(BIG_KEY, primary_key=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"))
    key_hash: Mapped[str] = mapped_column(String(64))
    request_hash: Mapped[str] = mapped_column(String(64))
    reply: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(index=True)


class Registration(Base):
    """An adapter being registered by reference, or how that ended. Deleted a week later."""

    __tablename__ = "registration"
    __table_args__ = (Index(None, "state", "updated_at"),)

    id: Mapped[int] = mapped_column(BIG_KEY, primary_key=True)
    registration_id: Mapped[str] = mapped_column(String(32), unique=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"), index=True)
    name: Mapped[str] = mapped_column(String(64))
    source: Mapped[str] = mapped_column(String(2048))
    state: Mapped[str] = mapped_column(String(16))
    received_bytes: Mapped[int] = mapped_column(BigInteger)
    total_bytes: Mapped[int | None] = mapped_column(BigInteger)
    version: Mapped[int | None]
    digest: Mapped[str | None] = mapped_column(String(64))
    is_new: Mapped[bool | None]
    error_code: Mapped[str | None] = mapped_column(String(64))
    error_message: Mapped[str | None] = mapped_column(String(512))
    error_field: Mapped[str | None] = mapped_column(String(255))
    owner: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class Usage(Base):
    """What one request used. It names adapters by text, because it outlives them."""

    __tablename__ = "usage"
    __table_args__ = (Index(None, "tenant_id", "created_at"), Index(None, "created_at"))

    id: Mapped[int] = mapped_column(BIG_KEY, primary_key=True)
    request_id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"))
    adapter: Mapped[str | None] = mapped_column(String(64))
    version: Mapped[int | None]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    finish_reason: Mapped[str] = mapped_column(String(32))
    queue_seconds: Mapped[float]
    load_seconds: Mapped[float]
    prefill_seconds: Mapped[float]
    decode_seconds: Mapped[float]
    engine_seconds: Mapped[float] = mapped_column(server_default="0")
    created_at: Mapped[datetime]


class Audit(Base):
    """Who changed what. Plain text, because it outlives what it names."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "tenant", "id"), Index(None, "tenant", "subject"))

    id: Mapped[int] = mapped_column(BIG_KEY, primary_key=True)
    actor: Mapped[str] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(32))
    tenant: Mapped[str | None] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(128))
    detail: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]
