"""Connections to Redis whose calls are answered soon or have failed, and a service's keys there."""

import asyncio
import hashlib
from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

CALL_SECONDS = 0.25
"""After so long without an answer a call counts as failed; a request pays that once an outage."""
FAILURES = (
    RedisError, OSError, TimeoutError, asyncio.IncompleteReadError,
    ValueError, TypeError, LookupError, AttributeError,
)  # fmt: skip
"""What a call raises while Redis is away, or while what answers is no Redis: its client takes much
of what it is told for granted."""


def open_pool(url: str, *, max_connections: int, call_seconds: float = CALL_SECONDS) -> Any:
    """A `BlockingConnectionPool` that never tries twice.

    Raises `ValueError` for a URL that is none of redis://, rediss:// or unix://.
    """
    return BlockingConnectionPool.from_url(
        url, max_connections=max_connections, timeout=call_seconds,
        socket_timeout=call_seconds, socket_connect_timeout=call_seconds,
        retry=Retry(NoBackoff(), 0),
    )  # fmt: skip


def key_prefix(service: str) -> str:
    """What all keys of a service begin with; services that share a Redis have other names."""
    return f"loraplex:{hashlib.sha256(service.encode()).hexdigest()[:16]}"
