"""Logins to the dashboard: sessions that live as long as they and their keys do.

Only the SHA-256 of a session's token is kept, as of a key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import KeyNotFound
from adapter_store.registry.models import ApiKey, Tenant
from adapter_store.registry.rollup_models import DashboardSession


@dataclass(frozen=True, slots=True)
class Login:
    """A session as its row and its key's tell it."""

    key_id: str | None
    """None: the admin key of the settings, which no row holds."""
    key_hash: str
    tenant: str | None
    scopes: frozenset[str]
    expires_at: datetime
    """The session's end, or its key's if that comes first."""
    is_revoked: bool
    """Whether the key was revoked, or its tenant suspended or deleted."""


async def create(
    session: AsyncSession, token_hash: str, key_hash: str, key_id: str | None,
    now: datetime, expires_at: datetime,
) -> None:  # fmt: skip
    """Log in. Raises `KeyNotFound` for a key that was deleted meanwhile."""
    api_key_id = None
    if key_id is not None:
        api_key_id = await session.scalar(select(ApiKey.id).where(ApiKey.key_id == key_id))
        if api_key_id is None:
            raise KeyNotFound(f"there is no key {key_id!r}")
    session.add(
        DashboardSession(
            token_hash=token_hash,
            api_key_id=api_key_id,
            key_hash=key_hash,
            created_at=now,
            expires_at=expires_at,
        )
    )


async def find(session: AsyncSession, token_hashes: Sequence[str]) -> dict[str, Login]:
    """The sessions that there are, by the hash of their token; for the caller to check."""
    rows = await session.execute(
        select(DashboardSession, ApiKey, Tenant)
        .outerjoin(ApiKey, ApiKey.id == DashboardSession.api_key_id)
        .outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
        .where(DashboardSession.token_hash.in_(token_hashes))
    )
    found = cast("Sequence[tuple[DashboardSession, ApiKey | None, Tenant | None]]", rows.all())
    return {row.token_hash: _login(row, key, tenant) for row, key, tenant in found}


async def end(session: AsyncSession, token_hash: str) -> None:
    """Log out; harmless a second time."""
    await session.execute(delete(DashboardSession).where(DashboardSession.token_hash == token_hash))


async def purge(session: AsyncSession, now: datetime) -> None:
    """Drop the sessions whose time is over."""
    await session.execute(delete(DashboardSession).where(DashboardSession.expires_at <= now))


def _login(row: DashboardSession, key: ApiKey | None, tenant: Tenant | None) -> Login:
    if key is None:
        return Login(None, row.key_hash, None, frozenset({"admin"}), row.expires_at, False)
    ends = row.expires_at if key.expires_at is None else min(row.expires_at, key.expires_at)
    is_out = tenant is not None and (tenant.suspended_at or tenant.deleted_at) is not None
    return Login(
        key.key_id, row.key_hash, tenant.name if tenant is not None else None,
        frozenset(key.scopes), ends, is_out or key.revoked_at is not None,
    )  # fmt: skip
