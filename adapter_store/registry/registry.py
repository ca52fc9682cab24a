"""The registry as the service sees it: one class, every method a transaction of its own.

The rules are in the modules beside this one, a noun each; here and in the `*_calls.py` they get
their session, the time, the audit entry's actor, and the cache. Any method may raise
`RegistryUnavailable`.
"""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import select

from adapter_store.registry import audit, usage, usage_totals
from adapter_store.registry.adapter_calls import AdapterCalls
from adapter_store.registry.login_calls import LoginCalls
from adapter_store.registry.models import Tenant
from adapter_store.registry.records import AuditEntry, UsageGroup, UsageRecord, UsageTotals
from adapter_store.registry.session import Database
from adapter_store.registry.tenant_calls import TenantCalls


class Registry(TenantCalls, AdapterCalls, LoginCalls):
    """All rules about tenants, keys, adapters, versions and aliases. For one event loop.

    `reserved_names` are those that the base model is served under; `base` always is one.
    `authenticate` and `resolve` answer from memory for up to a second (`cache.py`): a change made
    through this object is seen at once, one of another process within that second.
    """

    @property
    def database(self) -> Database:
        """For instrumentation, and for a health check."""
        return self._database

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

    async def sum_usage(
        self,
        since: datetime,
        until: datetime,
        group_by: Collection[UsageGroup],
        *,
        tenant: str | None = None,
        limit: int = 100_000,
    ) -> list[UsageTotals]:
        """Sums over what was recorded from `since` until before `until`, at most `limit` of them.

        Of a tenant, or of all, deleted ones included.
        """
        return await self._database.read(
            lambda s: usage_totals.sum_up(s, since, until, group_by, tenant=tenant, limit=limit)
        )

    async def list_audit(
        self, limit: int = 100, *, before: int | None = None, tenant: str | None = None
    ) -> list[AuditEntry]:
        """The newest changes, newest first: of a tenant, older than an entry, or all."""
        return await self._database.read(
            lambda s: audit.newest(s, limit, before=before, tenant=tenant)
        )

    async def ping(self) -> None:
        """Raise `RegistryUnavailable` unless the database answers."""
        # From a table: SQLite answers a bare SELECT 1 from a damaged file too.
        await self._database.read(lambda s: s.execute(select(Tenant.id).limit(1)))

    async def close(self) -> None:
        """Close the database's connections."""
        await self._database.close()
