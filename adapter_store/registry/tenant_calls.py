"""The registry's calls about tenants and their keys: each a transaction of its own."""

from collections.abc import Iterable
from datetime import datetime

from adapter_store.registry import keys, tenants
from adapter_store.registry.records import CreatedKey, KeyInfo, Principal, TenantInfo
from adapter_store.registry.transactions import Transactions


class TenantCalls(Transactions):
    """Part of `Registry`."""

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
