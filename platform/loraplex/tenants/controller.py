"""`/admin/tenants`: create, list, suspend and delete tenants."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, delete, get, post, put
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from msgspec import Meta

from adapter_store.registry.records import MAX_WEIGHT, MIN_WEIGHT, Quota, TenantInfo
from loraplex.adapters.publishing import remove_unused
from loraplex.auth import Caller, requires_admin
from loraplex.ending_calls import end_calls_of_tenant
from loraplex.json_body import read_struct
from loraplex.openapi import Problem, errors, json_body
from loraplex.paging import DEFAULT_LIMIT, PageAfter, PageLimit, cut
from loraplex.services import Services

_ERRORS = errors(Problem, 400, 401, 403, 404, 503)

UsagePolicy = Annotated[
    Literal["keep", "delete"],
    QueryParameter(
        description="`keep`: the usage rows stay, for billing, and nobody else gets the name. "
        "`delete`: they go too, and the name is free again."
    ),
]


class TenantCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new tenant."""

    name: str
    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    """Its share of the engine, relative to the others'."""


Limit = Annotated[int, Meta(ge=1, le=2**53)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may use; null: as much as there is."""

    requests_per_minute: Limit | None = None
    """Generation calls, and apart from them as many counts of tokens and exports."""
    tokens_per_minute: Limit | None = None
    """Prompt and output tokens, cached ones included."""
    max_concurrent: Limit | None = None
    """Sequences that run at once; more wait with the cause `quota`."""
    max_queued: Limit | None = None
    """Sequences that wait."""
    max_slots: Limit | None = None
    """Slots that its adapters use at once; calls of others wait with the cause `quota`."""
    max_adapters: Limit | None = None
    max_adapter_bytes: Limit | None = None
    """Of all versions' weights files together."""
    max_rank: Limit | None = None


class LimitChange(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's new limits: what is not named has no limit any more."""

    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] | None = None
    """Its share of the engine; null: as before."""


class Tenant(msgspec.Struct, frozen=True):
    """A tenant. While it is suspended its keys answer 403."""

    name: str
    weight: float
    created_at: datetime
    suspended_at: datetime | None
    quota: Limits


class TenantList(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of tenants, by name. `next` is the `after` of the next page, if there is one."""

    data: list[Tenant]
    next: str | None = None


class TenantController(Controller):
    """Who shares the service."""

    path = "/admin/tenants"
    guards = (requires_admin,)
    tags = ("admin",)

    @post(
        operation_id="createTenant",
        operation_class=json_body(TenantCreate),
        responses={**_ERRORS, **errors(Problem, 409)},
    )
    async def create(
        self, request: Request[Caller, None, Any], services: NamedDependency[Services]
    ) -> Tenant:
        """Create a tenant."""
        wanted = await read_struct(request, TenantCreate, services.settings.requests)
        registry = services.backends.registry
        return _tenant(
            await registry.create_tenant(wanted.name, wanted.weight, actor=request.user.actor)
        )

    @get(operation_id="listTenants", responses=_ERRORS)
    async def list(
        self,
        services: NamedDependency[Services],
        limit: PageLimit = DEFAULT_LIMIT,
        after: PageAfter = "",
    ) -> TenantList:
        """List tenants by name, a page at a time."""
        found = await services.backends.registry.list_tenants(limit + 1, after)
        page, has_more = cut(found, limit)
        return TenantList([_tenant(t) for t in page], page[-1].name if has_more else None)

    @get("/{tenant_name:str}", operation_id="getTenant", responses=_ERRORS)
    async def show(self, tenant_name: FromPath[str], services: NamedDependency[Services]) -> Tenant:
        """Show a tenant."""
        return _tenant(await services.backends.registry.get_tenant(tenant_name))

    @post(
        "/{tenant_name:str}/suspend",
        operation_id="suspendTenant",
        responses=_ERRORS,
        status_code=200,
    )
    async def suspend(
        self,
        request: Request[Caller, None, Any],
        tenant_name: FromPath[str],
        services: NamedDependency[Services],
    ) -> Tenant:
        """Refuse a tenant's keys from now on, and end what it has running."""
        tenant = await services.backends.registry.suspend_tenant(
            tenant_name, actor=request.user.actor
        )
        end_calls_of_tenant(services.backends.engine, tenant_name)
        return _tenant(tenant)

    @post(
        "/{tenant_name:str}/resume",
        operation_id="resumeTenant",
        responses=_ERRORS,
        status_code=200,
    )
    async def resume(
        self,
        request: Request[Caller, None, Any],
        tenant_name: FromPath[str],
        services: NamedDependency[Services],
    ) -> Tenant:
        """Let a suspended tenant go on."""
        return _tenant(
            await services.backends.registry.suspend_tenant(
                tenant_name, suspended=False, actor=request.user.actor
            )
        )

    @put(
        "/{tenant_name:str}/quota",
        operation_id="setTenantQuota",
        operation_class=json_body(LimitChange),
        responses=_ERRORS,
    )
    async def set_quota(
        self,
        request: Request[Caller, None, Any],
        tenant_name: FromPath[str],
        services: NamedDependency[Services],
    ) -> Tenant:
        """Replace what a tenant may use; what it has beyond that stays."""
        wanted = await read_struct(request, LimitChange, services.settings.requests)
        limits = msgspec.structs.asdict(wanted)
        weight: float | None = limits.pop("weight")
        return _tenant(
            await services.backends.registry.set_quota(
                tenant_name, Quota(**limits), weight=weight, actor=request.user.actor
            )
        )

    @delete("/{tenant_name:str}", operation_id="deleteTenant", responses=_ERRORS)
    async def remove(
        self,
        request: Request[Caller, None, Any],
        tenant_name: FromPath[str],
        services: NamedDependency[Services],
        usage: UsagePolicy = "keep",
    ) -> None:
        """Delete a tenant with its keys, adapters and files, and end what it has running."""
        unused = await services.backends.registry.delete_tenant(
            tenant_name, with_usage=usage == "delete", actor=request.user.actor
        )
        end_calls_of_tenant(services.backends.engine, tenant_name)
        services.backends.engine.forget(tenant_name)
        await services.residency.refresh()
        await remove_unused(services, unused)


def _tenant(tenant: TenantInfo) -> Tenant:
    return Tenant(
        tenant.name,
        tenant.weight,
        tenant.created_at,
        tenant.suspended_at,
        Limits(**asdict(tenant.quota)),
    )
