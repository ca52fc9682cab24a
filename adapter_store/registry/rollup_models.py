"""Tables of the dashboard: what the recorder writes of the engine's work, and who is logged in.

Tenants and adapters stand here as text, for traffic outlives what it names; `rollups.py` beside
this file drops a tenant's when its name is given free. Times are Unix seconds: buckets are counted
in them, and both databases compare them alike. Sketches are bytes that only the recorder's readers
understand.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ForeignKey,
    Index,
    LargeBinary,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from adapter_store.registry.models import BIG_KEY, Base


class DashboardSession(Base):
    """A login, by the SHA-256 of its token. It lives no longer than its key, and goes with it.

    `api_key_id` is NULL for the admin key of the settings, which no row holds: `key_hash` tells
    whether it still is that one.
    """

    __tablename__ = "dashboard_session"

    token_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    api_key_id: Mapped[int | None] = mapped_column(
        ForeignKey("api_key.id", ondelete="CASCADE"), index=True
    )
    key_hash: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class TrafficSubject(Base):
    """Whose traffic: all ("", "", 0), a tenant's (its name, "", 0), or a version's.

    The base is the adapter `base`, version 0.
    """

    __tablename__ = "traffic_subject"
    __table_args__ = (UniqueConstraint("tenant", "adapter", "version"),)

    id: Mapped[int] = mapped_column(BIG_KEY, primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64))
    adapter: Mapped[str] = mapped_column(String(64))
    version: Mapped[int]


class TrafficRollup(Base):
    """A subject's traffic in the `width` seconds from `start`; none means no row."""

    __tablename__ = "traffic_rollup"
    __table_args__ = (Index(None, "width", "start"),)

    subject_id: Mapped[int] = mapped_column(
        ForeignKey("traffic_subject.id", ondelete="CASCADE"), primary_key=True
    )
    width: Mapped[int] = mapped_column(primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    requests: Mapped[int]
    good: Mapped[int]
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    preemptions: Mapped[int]
    stop: Mapped[int]
    length: Mapped[int]
    abort: Mapped[int]
    timeout: Mapped[int]
    error: Mapped[int]
    prefill_tokens: Mapped[int] = mapped_column(BigInteger)
    decode_tokens: Mapped[int] = mapped_column(BigInteger)
    loads: Mapped[int]
    length_asked: Mapped[int] = mapped_column(server_default=text("0"))
    """Of `length`, those of requests that asked for all their tokens."""
    running: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """Sequences, summed over the looks at the engine (`EngineRollup.samples`); so `waiting`. Only
    tenants have them, and all together."""
    waiting: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    quota: Mapped[float]
    load: Mapped[float]
    slot: Mapped[float]
    kv: Mapped[float]
    budget: Mapped[float]
    turn: Mapped[float]
    resident_seconds: Mapped[float]
    last_request: Mapped[float]
    refused: Mapped[dict[str, Any]]
    """By reason code."""
    sketches: Mapped[bytes] = mapped_column(LargeBinary)


class EngineRollup(Base):
    """The engine itself in the `width` seconds from `start`.

    `covered` is for how many of them it was watched: without a row, nothing is known of them.
    """

    __tablename__ = "engine_rollup"

    width: Mapped[int] = mapped_column(primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    covered: Mapped[float]
    down: Mapped[float]
    missed: Mapped[int]
    samples: Mapped[int]
    running: Mapped[int] = mapped_column(BigInteger)
    waiting: Mapped[int] = mapped_column(BigInteger)
    kv_share: Mapped[float]
    slots_used: Mapped[int] = mapped_column(BigInteger)
    steps: Mapped[int]
    rows: Mapped[int] = mapped_column(BigInteger)
    adapters: Mapped[int] = mapped_column(BigInteger)
    prefill_tokens: Mapped[int] = mapped_column(BigInteger)
    decode_tokens: Mapped[int] = mapped_column(BigInteger)
    base_tokens: Mapped[int] = mapped_column(BigInteger)
    preemptions: Mapped[int]
    schedule: Mapped[float]
    prepare: Mapped[float]
    forward: Mapped[float]
    lora: Mapped[float]
    sample: Mapped[float]
    post: Mapped[float]
    sketches: Mapped[bytes] = mapped_column(LargeBinary)


class AdapterStanding(Base):
    """One adapter, all versions together, over the newest `span` seconds: a row of a table that is
    sorted by any of its columns. Written anew as time goes on; gone with the last traffic.
    """

    __tablename__ = "adapter_standing"
    __table_args__ = (Index(None, "span", "last_request"),)

    span: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(64), primary_key=True)
    requests: Mapped[int]
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    queue_p50: Mapped[float | None]
    queue_p95: Mapped[float | None]
    queue_p99: Mapped[float | None]
    queue_seconds: Mapped[float]
    load_p95: Mapped[float | None]
    ttft_p95: Mapped[float | None]
    token_time_p95: Mapped[float | None]
    token_gap_p95: Mapped[float | None]
    length_share: Mapped[float | None]
    resident_share: Mapped[float | None]
    last_request: Mapped[float | None]
    figures: Mapped[dict[str, Any]]
    """What nobody sorts by: the other sums, and two sparklines."""


class SlowRequest(Base):
    """A request that took long, for its adapter and hour, and where its time went."""

    __tablename__ = "slow_request"
    __table_args__ = (Index(None, "tenant", "adapter", "hour", "seconds"), Index(None, "hour"))

    id: Mapped[int] = mapped_column(BIG_KEY, primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64))
    adapter: Mapped[str] = mapped_column(String(64))
    hour: Mapped[int] = mapped_column(BigInteger)
    """When its hour began."""
    seconds: Mapped[float]
    """What it is ranked by."""
    ended: Mapped[float]
    record: Mapped[bytes] = mapped_column(LargeBinary)


class SlotSpan(Base):
    """A slot in one state for a while; `ended` is NULL while it lasts.

    `slot` is NULL for a reservation that has none yet.
    """

    __tablename__ = "slot_span"
    __table_args__ = (Index(None, "ended"), Index(None, "began"))

    id: Mapped[int] = mapped_column(BIG_KEY, primary_key=True)
    slot: Mapped[int | None]
    kind: Mapped[str] = mapped_column(String(16))
    digest: Mapped[str] = mapped_column(String(64))
    owners: Mapped[list[Any]] = mapped_column(JSON)
    """[[tenant, `name@N`], …], the last one to ask first."""
    began: Mapped[float]
    ended: Mapped[float | None]


class WaitingQueue(Base):
    """What waits or runs at this moment, by tenant and adapter version."""

    __tablename__ = "waiting_queue"

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    cause: Mapped[str | None] = mapped_column(String(8))
    waiting: Mapped[int]
    running: Mapped[int]
    waits_since: Mapped[float | None]
    """Unix seconds; when its head came, or later."""


class AlertRow(Base):
    """Something that goes wrong, or went; `ended` is NULL while it lasts."""

    __tablename__ = "alert"
    __table_args__ = (Index(None, "ended"),)

    id: Mapped[int] = mapped_column(BIG_KEY, primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    severity: Mapped[str] = mapped_column(String(16))
    tenant: Mapped[str | None] = mapped_column(String(64))
    adapter: Mapped[str | None] = mapped_column(String(64))
    version: Mapped[int | None]
    began: Mapped[float]
    ended: Mapped[float | None]
    what: Mapped[str] = mapped_column(String(500))
    change: Mapped[str] = mapped_column(String(500))
    figures: Mapped[list[Any]] = mapped_column(JSON)


class RecorderState(Base):
    """How far the recorder has read the engine's records; one row, written with what it read."""

    __tablename__ = "recorder_state"

    id: Mapped[int] = mapped_column(primary_key=True)
    run: Mapped[str] = mapped_column(String(32))
    """Of the service: its engines count their generations from 1."""
    cursor: Mapped[list[Any]] = mapped_column(JSON)
    """Into the engine's records; its generation comes first."""
    flush: Mapped[int] = mapped_column(BigInteger)
    """Counts up: tells whether a commit whose answer was lost came through."""
    complete_until: Mapped[float]
    missed: Mapped[int] = mapped_column(BigInteger)
    """Records lost since the service started."""
    detail: Mapped[dict[str, Any]]
    """What the engine runs with, and what it had refused by then."""
