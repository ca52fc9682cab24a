"""Replies to calls with an `Idempotency-Key`: kept for 24 hours, given again to a repeated call.

A key belongs to a tenant and to one request. Call and reply are stored in one transaction, and the
unique key decides between two calls at once: the second one runs again, and finds the reply.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import IdempotencyKeyReused
from adapter_store.registry.models import StoredReply

KEPT = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class RepeatableCall:
    """One call that may be repeated: its key, and the hash of all that it asks for."""

    key_hash: str
    request_hash: str

    @classmethod
    def of(cls, key: str, *request: Any) -> "RepeatableCall":
        """`request` names the call and all that matters of it, in values that JSON knows."""
        return cls(_sha256(key.encode()), _sha256(msgspec.json.encode(request)))


async def recall(
    session: AsyncSession, tenant_id: int, call: RepeatableCall, now: datetime
) -> dict[str, Any] | None:
    """The stored reply, None if this is the first such call in 24 hours.

    Raises `IdempotencyKeyReused` if the key came with another request.
    """
    row = await session.scalar(
        select(StoredReply).where(
            StoredReply.tenant_id == tenant_id, StoredReply.key_hash == call.key_hash
        )
    )
    if row is None:
        return None
    if row.created_at <= now - KEPT:
        await session.delete(row)
        await session.flush()
        return None
    if row.request_hash != call.request_hash:
        raise IdempotencyKeyReused("this Idempotency-Key came with another request before")
    return row.reply


async def remember(
    session: AsyncSession, tenant_id: int, call: RepeatableCall, reply: object, now: datetime
) -> None:
    """Store the reply (a record) to a call that `recall` did not know."""
    session.add(
        StoredReply(
            tenant_id=tenant_id,
            key_hash=call.key_hash,
            request_hash=call.request_hash,
            reply=msgspec.to_builtins(reply),
            created_at=now,
        )
    )
    await session.flush()


async def purge(session: AsyncSession, now: datetime) -> None:
    """Drop what is too old to be given again."""
    await session.execute(delete(StoredReply).where(StoredReply.created_at <= now - KEPT))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
