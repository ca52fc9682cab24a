"""What a tenant may use, and how much of it it uses now."""

import math
from dataclasses import asdict
from typing import Any, cast

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.registry.models import Adapter, AdapterVersion, Tenant
from loraplex.dashboard.views import Quota, QuotaUse
from loraplex.limits.shared_rates import SharedRates
from loraplex.services import Services


async def quota(services: Services, tenant: str) -> Quota:
    """Of the last minute, and of this moment. Raises `TenantNotFound`."""
    info = await services.backends.registry.get_tenant(tenant)
    used = await services.backends.registry.database.read(lambda s: _kept(s, tenant))
    used |= await _rates(services.backends.rates, tenant)
    load = await services.live.load(tenant)
    if load is not None:
        used |= {
            "max_concurrent": load.running, "max_queued": load.waiting, "max_slots": load.slots,
        }  # fmt: skip
    return Quota(
        tenant=tenant,
        weight=info.weight,
        is_suspended=info.suspended_at is not None,
        uses=[
            QuotaUse(cast(Any, name), limit, used.get(name) if _is_counted(name, limit) else None)
            for name, limit in asdict(info.quota).items()
        ],
    )


def _is_counted(name: str, limit: int | None) -> bool:
    """A rate without a limit is not counted."""
    return limit is not None or not name.endswith("_per_minute")


async def _rates(rates: SharedRates, tenant: str) -> dict[str, int]:
    """What the limiter counts, under its own names."""
    windows = {kind: await rates.window(f"{tenant}/{kind}") for kind in ("requests", "tokens")}
    return {f"{kind}_per_minute": math.floor(window.used) for kind, window in windows.items()}


async def _kept(session: AsyncSession, tenant: str) -> dict[str, int]:
    """Adapters that there are, and the bytes of all their versions."""
    of_tenant = select(Tenant.id).where(Tenant.name == tenant).scalar_subquery()
    adapters = await session.scalar(
        select(func.count())
        .select_from(Adapter)
        .where(Adapter.tenant_id == of_tenant, Adapter.deleted_at.is_(None))
    )
    size = await session.scalar(
        select(func.sum(AdapterVersion.bytes))
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.tenant_id == of_tenant)
    )
    return {"max_adapters": adapters or 0, "max_adapter_bytes": int(size or 0)}
