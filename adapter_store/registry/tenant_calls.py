"""The registry's calls about tenants and their keys: each a transaction of its own."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry import adapters, keys, quotas, source_grants, tenants
from adapter_store.registry.records import CreatedKey, KeyInfo, Principal, Quota, TenantInfo
from adapter_store.registry.transactions import ALL_KEYS, Transactions


class TenantCalls(Transactions):
    """Part of `Registry`."""

    # Tenants

    async def create_tenant(
        self, name: str, weight: float = 1.0, *, actor: str = "system"
    ) -> TenantInfo:
        """Raises `InvalidName`, `InvalidField` or `NameTaken`."""
        change = self._change(actor)
        return await self._database.write(lambda s: tenants.create(s, change, name, weight))

    async def list_tenants(self, limit: int | None = None, after: str = "") -> list[TenantInfo]:
        """Tenants by name: all, or the first `limit` of those after a name."""
        return await self._database.read(lambda s: tenants.list_all(s, limit, after))

    async def get_tenant(self, name: str) -> TenantInfo:
        """Raises `TenantNotFound`."""
        return await self._database.read(lambda s: tenants.get(s, name))

    async def suspend_tenant(
        self, name: str, *, suspended: bool = True, actor: str = "system"
    ) -> TenantInfo:
        """Suspend a tenant, or with `suspended=False` let it go on; raises `TenantNotFound`."""
        change = self._change(actor)
        return await self._change_principals(
            lambda s: tenants.suspend(s, change, name, suspended=suspended)
        )

    async def set_quota(
        self, name: str, quota: Quota, *, weight: float | None = None, actor: str = "system"
    ) -> TenantInfo:
        """Replace a tenant's quota whole, and its weight if one is given.

        Raises `TenantNotFound` or `InvalidField`.
        """
        change = self._change(actor)
        return await self._change_principals(
            lambda s: quotas.set_quota(s, change, name, quota, weight)
        )

    async def allow_source(
        self, name: str, source: str, credential: str | None, *, actor: str = "system"
    ) -> TenantInfo:
        """Let a tenant register from a source. Raises `TenantNotFound` or `InvalidField`."""
        change = self._change(actor)
        return await self._change_principals(
            lambda s: source_grants.allow(s, change, name, source, credential)
        )

    async def withdraw_source(self, name: str, source: str, *, actor: str = "system") -> TenantInfo:
        """Take a source back. Raises `TenantNotFound` or `InvalidField`."""
        change = self._change(actor)
        return await self._change_principals(
            lambda s: source_grants.withdraw(s, change, name, source)
        )

    async def delete_tenant(
        self, name: str, *, with_usage: bool = False, actor: str = "system"
    ) -> list[str]:
        """Delete a tenant with its keys and adapters; its usage rows stay unless `with_usage`.

        As long as they stay its name is not given out again. Returns the digests that nothing names
        any more: unload them, then let the sweeper have them. Raises `TenantNotFound`.
        """
        change = self._change(actor)
        gone: list[str] = []

        async def remove(session: AsyncSession) -> list[str]:
            owner = await tenants.find(session, name, lock="change", deleted_too=with_usage)
            gone[:] = await adapters.names_of(session, owner.id)
            return await tenants.remove(session, change, name, with_usage=with_usage)

        digests = await self._change_principals(remove)
        for adapter in gone:
            await self._routes.invalidate(f"{name}/{adapter}")
        return digests

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

    async def list_keys(
        self, tenant: str | None, limit: int | None = None, after: str = ""
    ) -> list[KeyInfo]:
        """A tenant's keys, or the platform's (None), oldest first: all, or the first `limit` of
        those after a key's id. Raises `TenantNotFound` or `InvalidField` (after).
        """
        return await self._database.read(lambda s: keys.list_of(s, tenant, limit, after))

    async def revoke_key(
        self, key_id: str, *, tenant: str | None = None, actor: str = "system"
    ) -> KeyInfo:
        """Revoke a key; with `tenant`, only one of that tenant. Raises `KeyNotFound`."""
        change = self._change(actor)
        return await self._change_principals(lambda s: keys.revoke(s, change, key_id, tenant))

    async def revoke_own_key(
        self, key_id: str, *, may_be_last: bool = False, actor: str = "system"
    ) -> KeyInfo:
        """Revoke a key of the platform's, the last admin key only with `may_be_last`.

        Raises `KeyNotFound` or `LastAdminKey`.
        """
        change = self._change(actor)
        return await self._change_principals(
            lambda s: keys.revoke_own(s, change, key_id, may_be_last=may_be_last)
        )

    async def rotate_key(
        self,
        key_id: str,
        overlap: timedelta,
        expires_at: datetime | None = None,
        *,
        tenant: str | None = None,
        actor: str = "system",
    ) -> CreatedKey:
        """Make a key's successor with the same scopes; the old key works on for `overlap`.

        The new one expires at `expires_at`, by default after as long a life as the old one was
        given. Raises `KeyNotFound`, `KeyInactive` or `InvalidField`.
        """
        change = self._change(actor)
        return await self._change_principals(
            lambda s: keys.rotate(s, change, key_id, tenant, overlap, expires_at)
        )

    async def authenticate(self, plain_key: str) -> Principal | None:
        """Whom a key speaks for; None if it is unknown, revoked or past its time."""
        key_hash = keys.hash_key(plain_key)
        if key_hash is None:
            return None
        principal = await self._principals.get(
            ALL_KEYS,
            key_hash,
            lambda: self._database.read(lambda s: keys.find_principal(s, key_hash)),
        )
        if principal is None:
            return None
        now = self._clock()
        if principal.expires_at is not None and principal.expires_at <= now:
            return None
        self._used_keys[principal.key_id] = now
        return principal

    async def record_key_use(self) -> None:
        """Write when keys were last used; for a timer, so that no request waits for it."""
        used, self._used_keys = self._used_keys, {}
        if not used:
            return
        try:
            await self._database.write(lambda s: keys.record_use(s, used))
        except RegistryUnavailable:
            self._used_keys = used | self._used_keys
            raise
