"""The registry as the service sees it: one class, every method a transaction of its own.

The rules are in the modules beside this one, a noun each; here they get their session, the time,
the audit entry's actor, and the cache. Any method may raise `RegistryUnavailable`.
"""

import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.model_ref import ModelRef, check_adapter_name
from adapter_store.peft_format import InspectedAdapter
from adapter_store.registry import (
    adapters,
    aliases,
    audit,
    keys,
    residency,
    tenants,
    usage,
    versions,
)
from adapter_store.registry.audit import Change
from adapter_store.registry.cache import ReadThroughCache
from adapter_store.registry.models import Tenant
from adapter_store.registry.records import (
    AdapterInfo,
    AliasChange,
    AuditEntry,
    CreatedKey,
    KeyInfo,
    Principal,
    RegisteredVersion,
    Residency,
    ResidencyLimits,
    ResidentAdapters,
    ResolvedAdapter,
    TenantInfo,
    UsageRecord,
    VersionInfo,
)
from adapter_store.registry.session import Database

T = TypeVar("T")


def utc_now() -> datetime:
    """The time, aware."""
    return datetime.now(UTC)


class Registry:
    """All rules about tenants, keys, adapters, versions and aliases. For one event loop.

    `reserved_names` are those that the base model is served under; `base` always is one.
    `authenticate` and `resolve` answer from memory for up to a second (`cache.py`): a change made
    through this object is seen at once, one of another process within that second.
    """

    def __init__(
        self,
        database: Database,
        *,
        reserved_names: Iterable[str] = (),
        clock: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._reserved = frozenset(reserved_names)
        self._clock = clock
        self._principals = ReadThroughCache[str, Principal](monotonic=monotonic)
        self._resolved = ReadThroughCache[tuple[str, ModelRef], ResolvedAdapter](
            monotonic=monotonic
        )

    @property
    def database(self) -> Database:
        """For instrumentation, and for a health check."""
        return self._database

    # Tenants

    async def create_tenant(
        self, name: str, weight: float = 1.0, *, actor: str = "system"
    ) -> TenantInfo:
        """Raises `InvalidName`, `InvalidField` or `NameTaken`."""
        change = self._change(actor)
        return await self._database.write(lambda s: tenants.create(s, change, name, weight))

    async def list_tenants(self) -> list[TenantInfo]:
        """All tenants, by name."""
        return await self._database.read(tenants.list_all)

    async def get_tenant(self, name: str) -> TenantInfo:
        """Raises `TenantNotFound`."""
        return await self._database.read(lambda s: tenants.get(s, name))

    # Keys

    async def create_key(
        self,
        tenant: str | None,
        scopes: Iterable[str] = ("inference",),
        expires_at: datetime | None = None,
        *,
        actor: str = "system",
    ) -> CreatedKey:
        """A new key of a tenant, or of the platform (None).

        Raises `TenantNotFound` or `InvalidField` (scopes, expires_at).
        """
        change, granted = self._change(actor), frozenset(scopes)
        return await self._database.write(
            lambda s: keys.create(s, change, tenant, granted, expires_at)
        )

    async def ensure_admin_key(self) -> CreatedKey | None:
        """The service's own admin key, the first time on a database; None ever after."""
        change = self._change("system")
        return await self._database.write(lambda s: keys.create_admin(s, change))

    async def list_keys(self, tenant: str | None) -> list[KeyInfo]:
        """A tenant's keys, or the platform's (None); raises `TenantNotFound`."""
        return await self._database.read(lambda s: keys.list_of(s, tenant))

    async def revoke_key(
        self, key_id: str, *, tenant: str | None = None, actor: str = "system"
    ) -> KeyInfo:
        """Revoke a key; with `tenant`, only one of that tenant. Raises `KeyNotFound`."""
        change = self._change(actor)
        try:
            return await self._database.write(lambda s: keys.revoke(s, change, key_id, tenant))
        finally:
            self._principals.clear()

    async def authenticate(self, plain_key: str) -> Principal | None:
        """Whom a key speaks for; None if it is unknown, revoked or past its time."""
        key_hash = keys.hash_key(plain_key)
        if key_hash is None:
            return None
        principal = await self._principals.get(
            key_hash,
            lambda: self._database.read(lambda s: keys.find_principal(s, key_hash)),
        )
        if principal is None:
            return None
        expired = principal.expires_at is not None and principal.expires_at <= self._clock()
        return None if expired else principal

    # Adapters and versions

    def check_name(self, name: str) -> None:
        """Raise `InvalidName` or `NameReserved` unless an adapter may be called that."""
        check_adapter_name(name, self._reserved)

    async def register_version(
        self,
        tenant: str,
        name: str,
        inspected: InspectedAdapter,
        base_fingerprint: str,
        *,
        publish: bool = True,
        actor: str = "system",
    ) -> RegisteredVersion:
        """Make an upload, whose files are stored already, the next version of a name.

        If the newest version has the same digest and base, it is returned instead (`created` is
        False). With `publish` the alias `default` then points to the version returned, whether it
        is new or not: who uploads for publication gets what was uploaded, also after a roll-back.
        Without, no alias moves; a first version then answers to `name@1` only.
        Raises `InvalidName`, `NameReserved` or `TenantNotFound`.
        """
        self.check_name(name)
        change = self._change(actor)
        return await self._change_adapters(
            lambda s: versions.register(
                s, change, tenant, name, inspected, base_fingerprint, publish
            )
        )

    async def resolve(self, tenant: str, ref: ModelRef) -> ResolvedAdapter:
        """The version that a reference names now.

        Raises `ModelNotFound`, the same for what is unknown, another tenant's or deleted.
        """
        resolved = await self._resolved.get(
            (tenant, ref),
            lambda: self._database.read(lambda s: versions.resolve(s, tenant, ref)),
        )
        assert resolved is not None
        return resolved

    async def list_adapters(self, tenant: str) -> list[AdapterInfo]:
        """A tenant's adapters, by name; raises `TenantNotFound`."""
        return await self._database.read(lambda s: adapters.list_of(s, tenant))

    async def get_adapter(self, tenant: str, name: str) -> AdapterInfo:
        """Raises `TenantNotFound` or `AdapterNotFound`."""
        return await self._database.read(lambda s: adapters.get(s, tenant, name))

    async def list_versions(self, tenant: str, name: str) -> list[VersionInfo]:
        """An adapter's versions, newest first; raises `TenantNotFound` or `AdapterNotFound`."""
        return await self._database.read(lambda s: versions.list_of(s, tenant, name))

    async def delete_adapter(self, tenant: str, name: str, *, actor: str = "system") -> list[str]:
        """Delete an adapter whole; a later upload goes on with the numbers.

        Returns the digests that nothing names any more: unload them, then let the sweeper have
        them. Raises `TenantNotFound` or `AdapterNotFound`.
        """
        change = self._change(actor)
        return await self._change_adapters(lambda s: adapters.remove(s, change, tenant, name))

    async def delete_version(
        self, tenant: str, name: str, version: int, *, actor: str = "system"
    ) -> list[str]:
        """Delete a version, and with the last one the adapter; returns as `delete_adapter` does.

        Raises `TenantNotFound`, `AdapterNotFound`, `VersionNotFound`, or `VersionInUse` while an
        alias points to it.
        """
        change = self._change(actor)
        return await self._change_adapters(
            lambda s: versions.remove(s, change, tenant, name, version)
        )

    async def set_alias(
        self,
        tenant: str,
        name: str,
        alias: str,
        version: int,
        *,
        expect: int | None = None,
        actor: str = "system",
    ) -> AliasChange:
        """Point an alias to a version; with `expect`, only if it points to that version now.

        Raises `InvalidName`, `TenantNotFound`, `AdapterNotFound`, `VersionNotFound` or
        `AliasConflict`.
        """
        change = self._change(actor)
        return await self._change_adapters(
            lambda s: aliases.set_alias(s, change, tenant, name, alias, version, expect)
        )

    async def set_residency(
        self,
        tenant: str,
        name: str,
        wanted: Residency,
        limits: ResidencyLimits,
        *,
        actor: str = "system",
    ) -> AdapterInfo:
        """Say where an adapter is kept: by name, so it goes where the alias `default` goes.

        Raises `TenantNotFound`, `AdapterNotFound`, or `ResidencyLimit` where it would not fit.
        """
        change = self._change(actor)
        return await self._database.write(
            lambda s: residency.set_residency(s, change, tenant, name, wanted, limits)
        )

    async def resident_adapters(self, base_fingerprint: str) -> ResidentAdapters:
        """The adapters of a base model that are pinned, and those that are warm."""
        return await self._database.read(lambda s: residency.resident(s, base_fingerprint))

    async def live_digests(self, digests: Iterable[str]) -> set[str]:
        """Those of `digests` that a version of any tenant names."""
        return await self._database.read(lambda s: versions.live_digests(s, digests))

    async def is_live(self, digest: str) -> bool:
        """Whether a version of any tenant names the digest."""
        return await self._database.read(lambda s: versions.is_live(s, digest))

    async def digests_in_use(self) -> list[str]:
        """Every digest that a version of any tenant names, sorted."""
        return await self._database.read(versions.digests_in_use)

    async def names_in_use(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that a tenant's adapter has, sorted: no base model may have them."""
        return await self._database.read(lambda s: adapters.names_in_use(s, names))

    # Usage and audit

    async def record_usage(self, *records: UsageRecord) -> None:
        """Store usage rows in one transaction; a request id stored before is left alone.

        Raises `TenantNotFound`, and stores none then.
        """
        now = self._clock()
        await self._database.write(lambda s: usage.record(s, records, now))

    async def list_usage(self, tenant: str, limit: int = 100) -> list[UsageRecord]:
        """A tenant's newest usage rows; raises `TenantNotFound`."""
        return await self._database.read(lambda s: usage.newest(s, tenant, limit))

    async def list_audit(self, limit: int = 100) -> list[AuditEntry]:
        """The newest changes of all tenants."""
        return await self._database.read(lambda s: audit.newest(s, limit))

    async def ping(self) -> None:
        """Raise `RegistryUnavailable` unless the database answers."""
        # From a table: SQLite answers a bare SELECT 1 from a damaged file too.
        await self._database.read(lambda s: s.execute(select(Tenant.id).limit(1)))

    async def close(self) -> None:
        """Close the database's connections."""
        await self._database.close()

    def _change(self, actor: str) -> Change:
        return Change(actor, self._clock())

    async def _change_adapters(self, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        # Also when it fails or is cancelled: the commit may have come through.
        try:
            return await self._database.write(work)
        finally:
            self._resolved.clear()
