"""API keys: 256 random bits, stored as their SHA-256.

A fast hash is enough because there is nothing to guess: no dictionary holds a random key.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import cast

from sqlalchemy import bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import InvalidField, KeyInactive, KeyNotFound, LastAdminKey
from adapter_store.registry import tenants
from adapter_store.registry.audit import Change
from adapter_store.registry.models import ApiKey, Tenant
from adapter_store.registry.records import CreatedKey, KeyInfo, Principal

KEY_PREFIX = "lpx_"
TENANT_SCOPES = frozenset({"tenant", "inference", "metrics"})
PLATFORM_SCOPES = frozenset({"admin", "metrics"})
ADMIN_PURPOSE = "admin"

_END_OF_TIME = datetime.max.replace(tzinfo=UTC)
_KEY_ID = re.compile(r"key_[0-9a-f]{16}")
_KEY = re.compile(re.escape(KEY_PREFIX) + r"[A-Za-z0-9_-]{43}")


def hash_key(plain: str) -> str | None:
    """SHA-256 in hex; None for what can't be one of our keys."""
    return hashlib.sha256(plain.encode()).hexdigest() if _KEY.fullmatch(plain) else None


async def create(
    session: AsyncSession,
    change: Change,
    tenant: str | None,
    scopes: Iterable[str],
    expires_at: datetime | None,
    purpose: str | None = None,
) -> CreatedKey:
    """Raises `TenantNotFound` or `InvalidField`.

    A tenant's key may have the scopes `tenant`, `inference`, `metrics`; a platform key (no tenant)
    `admin`, `metrics`.
    """
    granted = frozenset(scopes)
    _check_scopes(granted, TENANT_SCOPES if tenant is not None else PLATFORM_SCOPES)
    expires_at = _checked_expiry(expires_at, change.now)
    owner = await tenants.find(session, tenant, lock="keep") if tenant is not None else None
    plain = KEY_PREFIX + secrets.token_urlsafe(32)
    row = ApiKey(
        key_id=f"key_{secrets.token_hex(8)}",
        key_hash=hashlib.sha256(plain.encode()).hexdigest(),
        hint=f"{KEY_PREFIX}…{plain[-4:]}",
        tenant_id=owner.id if owner is not None else None,
        scopes=sorted(granted),
        purpose=purpose,
        created_at=change.now,
        expires_at=expires_at,
        revoked_at=None,
        last_used_at=None,
    )
    session.add(row)
    change.record(session, "key.create", tenant, row.key_id, scopes=row.scopes)
    await session.flush()
    return CreatedKey(plain, _info(row, tenant))


async def create_admin(session: AsyncSession, change: Change) -> CreatedKey | None:
    """The service's own admin key, once in a database's life; None ever after."""
    if await session.scalar(select(ApiKey.id).where(ApiKey.purpose == ADMIN_PURPOSE)) is not None:
        return None
    return await create(session, change, None, {"admin"}, None, purpose=ADMIN_PURPOSE)


async def list_of(
    session: AsyncSession, tenant: str | None, limit: int | None = None, after: str = ""
) -> list[KeyInfo]:
    """A tenant's keys, or the platform's, oldest first: all, or the first `limit` after a key's id.

    Raises `TenantNotFound` or `InvalidField` (after).
    """
    owner = (await tenants.find(session, tenant)).id if tenant is not None else None
    mine = ApiKey.tenant_id.is_not_distinct_from(owner)
    query = select(ApiKey).where(mine).order_by(ApiKey.id).limit(limit)
    if after:
        is_id = _KEY_ID.fullmatch(after) is not None  # databases refuse some other texts
        last = select(ApiKey.id).where(mine, ApiKey.key_id == after)
        if (row_id := await session.scalar(last) if is_id else None) is None:
            raise InvalidField("after", "`after` must be the last key's id of the page before")
        query = query.where(ApiKey.id > row_id)
    return [_info(row, tenant) for row in await session.scalars(query)]


async def revoke(session: AsyncSession, change: Change, key_id: str, tenant: str | None) -> KeyInfo:
    """Revoke a key for good. A second time changes nothing.

    With `tenant`, only a key of that tenant is found. Raises `KeyNotFound`.
    """
    row, owner = await _find(session, key_id, tenant)
    if row.revoked_at is None:
        row.revoked_at = change.now
        change.record(session, "key.revoke", owner, key_id)
        await session.flush()
    return _info(row, owner)


async def revoke_own(
    session: AsyncSession, change: Change, key_id: str, *, may_be_last: bool
) -> KeyInfo:
    """Revoke one of the platform's keys for good. A second time changes nothing.

    Raises `KeyNotFound`, or without `may_be_last` `LastAdminKey` for the only one that lets an
    admin in now.
    """
    # All of them are locked, in one order: two calls never revoke each the other's last one.
    rows = (
        await session.scalars(
            select(ApiKey).where(ApiKey.tenant_id.is_(None)).order_by(ApiKey.id).with_for_update()
        )
    ).all()
    row = next((row for row in rows if row.key_id == key_id), None)
    if row is None:
        raise _key_not_found(key_id)
    if row.revoked_at is None:
        admins = [r for r in rows if _lets_admin_in(r, change.now)]
        if admins == [row] and not may_be_last:
            raise LastAdminKey(f"{key_id} is the last admin key that works: create another first")
        row.revoked_at = change.now
        change.record(session, "key.revoke", None, key_id)
        await session.flush()
    return _info(row, None)


async def rotate(
    session: AsyncSession,
    change: Change,
    key_id: str,
    tenant: str | None,
    overlap: timedelta,
    expires_at: datetime | None,
) -> CreatedKey:
    """Make a key's successor, with the same scopes; the old key ends after `overlap`.

    The new key expires at `expires_at`, by default after as long a life as the old one was given.
    Raises `KeyNotFound`, `InvalidField`, or `KeyInactive` for one that is revoked or expired.
    """
    row, owner = await _find(session, key_id, tenant)
    if row.revoked_at is not None or _has_expired(row, change.now):
        raise KeyInactive(f"the key {key_id} is revoked or past its time: create a new one")
    if expires_at is None and row.expires_at is not None:
        life = min(row.expires_at - row.created_at, _END_OF_TIME - change.now)
        expires_at = change.now + life
    created = await create(session, change, owner, row.scopes, expires_at)
    ends_at = change.now + overlap
    if row.expires_at is not None:
        ends_at = min(row.expires_at, ends_at)
    row.expires_at = ends_at
    change.record(
        session, "key.rotate", owner, key_id,
        successor=created.key_id, ends_at=ends_at.isoformat(),
    )  # fmt: skip
    await session.flush()
    return created


async def record_use(session: AsyncSession, used: Mapping[str, datetime]) -> None:
    """Write when keys (by id) were last used; an older time changes nothing."""
    if not used:
        return
    at = bindparam("at", type_=ApiKey.last_used_at.type)
    note = (
        update(ApiKey)
        .where(
            ApiKey.key_id == bindparam("of_key"),
            ApiKey.last_used_at.is_(None) | (ApiKey.last_used_at < at),
        )
        .values(last_used_at=at)
    )
    connection = await session.connection()  # a session takes many rows by primary key only
    # In one order, or two processes could wait for each other.
    await connection.execute(note, [{"of_key": key, "at": used[key]} for key in sorted(used)])


def _lets_admin_in(row: ApiKey, now: datetime) -> bool:
    return "admin" in row.scopes and row.revoked_at is None and not _has_expired(row, now)


def _has_expired(row: ApiKey, now: datetime) -> bool:
    return row.expires_at is not None and row.expires_at <= now


async def _find(
    session: AsyncSession, key_id: str, tenant: str | None
) -> tuple[ApiKey, str | None]:
    found = None
    if _KEY_ID.fullmatch(key_id):
        found = (
            await session.execute(
                select(ApiKey, Tenant.name)
                .outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
                .where(ApiKey.key_id == key_id)
                .with_for_update(of=ApiKey)
            )
        ).one_or_none()
    if found is None or (tenant is not None and found[1] != tenant):
        raise _key_not_found(key_id)
    return found[0], found[1]


def _key_not_found(key_id: str) -> KeyNotFound:
    return KeyNotFound(f"there is no key {key_id[:32]!r}")


async def find_principal(session: AsyncSession, key_hash: str) -> Principal | None:
    """Whom a key speaks for, unless it is unknown or revoked. Expiry is for the caller to check."""
    found = (
        await session.execute(
            select(ApiKey, Tenant)
            .outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
            .where(ApiKey.key_hash == key_hash, ApiKey.revoked_at.is_(None))
        )
    ).one_or_none()
    if found is None:
        return None
    row, tenant = cast("tuple[ApiKey, Tenant | None]", found)  # an outer join
    return Principal(
        key_id=row.key_id,
        tenant=tenants.info_of(tenant) if tenant is not None else None,
        scopes=frozenset(row.scopes),
        expires_at=row.expires_at,
    )


def _check_scopes(granted: frozenset[str], allowed: frozenset[str]) -> None:
    if not granted or not granted <= allowed:
        wrong = ", ".join(sorted(repr(scope[:32]) for scope in granted - allowed)) or "none"
        raise InvalidField(
            "scopes", f"scopes must be some of {', '.join(sorted(allowed))}; got {wrong}"
        )


def _checked_expiry(expires_at: datetime | None, now: datetime) -> datetime | None:
    if expires_at is None:
        return None
    if expires_at.tzinfo is None:
        raise InvalidField("expires_at", "expires_at needs a time zone, as in 2030-01-01T00:00:00Z")
    if expires_at <= now:
        raise InvalidField("expires_at", f"expires_at is in the past: {expires_at.isoformat()}")
    try:
        return expires_at.astimezone(UTC)
    except OverflowError:
        raise InvalidField("expires_at", "expires_at is after the year 9999 in UTC") from None


def _info(row: ApiKey, tenant: str | None) -> KeyInfo:
    return KeyInfo(
        key_id=row.key_id,
        hint=row.hint,
        tenant=tenant,
        scopes=frozenset(row.scopes),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )
