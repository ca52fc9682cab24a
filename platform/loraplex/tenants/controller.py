"""`/admin/tenants` and the keys of each."""

from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Controller, delete, get, post
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import Meta

from adapter_store.registry.records import MAX_WEIGHT, MIN_WEIGHT, KeyInfo, Scope, TenantInfo
from loraplex.auth import Caller, requires_admin
from loraplex.json_body import read_struct
from loraplex.openapi import Problem, errors, json_body
from loraplex.services import Services

_ERRORS = errors(Problem, 400, 401, 403, 404, 503)


class TenantCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new tenant."""

    name: str
    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    """Its share of the engine, relative to the others'."""


class Tenant(msgspec.Struct, frozen=True):
    """A tenant."""

    name: str
    weight: float
    created_at: datetime


class TenantList(msgspec.Struct, frozen=True):
    """All tenants, by name."""

    data: list[Tenant]


class KeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new key of a tenant."""

    scopes: Annotated[list[Scope], Meta(min_length=1)] | None = None
    """Default: `inference`."""
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None
    """With a time zone; default: never."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret; `hint` is for recognising it."""

    id: str
    hint: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class CreatedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key. `key` is shown this once."""

    key: str
    id: str
    tenant: str
    scopes: list[str]
    expires_at: datetime | None


class KeyList(msgspec.Struct, frozen=True):
    """The keys of a tenant."""

    data: list[Key]


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
    async def list(self, services: NamedDependency[Services]) -> TenantList:
        """List all tenants."""
        return TenantList([_tenant(t) for t in await services.backends.registry.list_tenants()])

    @post(
        "/{tenant_name:str}/keys",
        operation_id="createKey",
        operation_class=json_body(KeyCreate),
        responses=_ERRORS,
    )
    async def create_key(
        self,
        request: Request[Caller, None, Any],
        tenant_name: FromPath[str],
        services: NamedDependency[Services],
    ) -> CreatedKey:
        """Create a key of a tenant; it is shown in this reply only."""
        wanted = await read_struct(request, KeyCreate, services.settings.requests)
        created = await services.backends.registry.create_key(
            tenant_name,
            wanted.scopes or ("inference",),
            wanted.expires_at,
            actor=request.user.actor,
        )
        return CreatedKey(
            key=created.plain,
            id=created.key_id,
            tenant=tenant_name,
            scopes=sorted(created.info.scopes),
            expires_at=created.info.expires_at,
        )

    @get("/{tenant_name:str}/keys", operation_id="listKeys", responses=_ERRORS)
    async def list_keys(
        self, tenant_name: FromPath[str], services: NamedDependency[Services]
    ) -> KeyList:
        """List a tenant's keys, revoked ones too; never the keys themselves."""
        return KeyList([_key(k) for k in await services.backends.registry.list_keys(tenant_name)])

    @delete("/{tenant_name:str}/keys/{key_id:str}", operation_id="revokeKey", responses=_ERRORS)
    async def revoke_key(
        self,
        request: Request[Caller, None, Any],
        tenant_name: FromPath[str],
        key_id: FromPath[str],
        services: NamedDependency[Services],
    ) -> None:
        """Revoke a key."""
        await services.backends.registry.revoke_key(
            key_id, tenant=tenant_name, actor=request.user.actor
        )


def _tenant(tenant: TenantInfo) -> Tenant:
    return Tenant(tenant.name, tenant.weight, tenant.created_at)


def _key(key: KeyInfo) -> Key:
    return Key(
        id=key.key_id,
        hint=key.hint,
        scopes=sorted(key.scopes),
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
    )
