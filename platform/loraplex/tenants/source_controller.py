"""`/admin/tenants/{tenant}/sources`: what a tenant may register by reference, and how."""

from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, delete, get, put
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from msgspec import Meta

from adapter_store.references.policy import PolicyError
from adapter_store.registry.records import TenantInfo
from loraplex.auth import Caller, requires_admin
from loraplex.errors import InvalidRequest
from loraplex.json_body import read_struct
from loraplex.openapi import Problem, errors, json_body
from loraplex.services import Services

_ERRORS = errors(Problem, 400, 401, 403, 404, 503)

Source = Annotated[str, Meta(min_length=1, max_length=1024)]


class SourceGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hub organisation (`hf://org`) or a bucket's prefix (`s3://bucket/prefix`)."""

    source: Source
    credential: Annotated[str, Meta(max_length=64)] | None = None
    """Which of the operator's credentials it is fetched with; null: none."""


class GrantedSource(msgspec.Struct, frozen=True):
    """A source that a tenant may use. The operator's `file` has some that no call changes."""

    source: str
    credential: str | None
    granted_in: Literal["registry", "file"]


class SourceList(msgspec.Struct, frozen=True):
    """What a tenant may use, and the names of all credentials that there are."""

    data: list[GrantedSource]
    credentials: list[str]
    public_sources: bool
    """Whether it may also use what is public."""


class SourceController(Controller):
    """The sources that a tenant may use."""

    path = "/admin/tenants/{tenant_name:str}/sources"
    guards = (requires_admin,)
    tags = ("admin",)

    @get(operation_id="listSources", responses=_ERRORS)
    async def list(
        self, tenant_name: FromPath[str], services: NamedDependency[Services]
    ) -> SourceList:
        """List the sources that a tenant may register adapters from."""
        return _list(services, await services.backends.registry.get_tenant(tenant_name))

    @put(operation_id="allowSource", operation_class=json_body(SourceGrant), responses=_ERRORS)
    async def allow(
        self,
        request: Request[Caller, None, Any],
        tenant_name: FromPath[str],
        services: NamedDependency[Services],
    ) -> SourceList:
        """Let a tenant use a source, with one of the operator's credentials or without."""
        wanted = await read_struct(request, SourceGrant, services.settings.requests)
        try:
            services.backends.sources.policy.check_grant(wanted.source, wanted.credential)
        except PolicyError as error:
            raise InvalidRequest("source", str(error)) from None
        tenant = await services.backends.registry.allow_source(
            tenant_name, wanted.source, wanted.credential, actor=request.user.actor
        )
        return _list(services, tenant)

    @delete(operation_id="withdrawSource", responses=_ERRORS)
    async def withdraw(
        self,
        request: Request[Caller, None, Any],
        tenant_name: FromPath[str],
        services: NamedDependency[Services],
        source: Annotated[str, QueryParameter(max_length=1024, description="As it was allowed.")],
    ) -> None:
        """Take a source back from a tenant; what it has registered from there stays."""
        await services.backends.registry.withdraw_source(
            tenant_name, source, actor=request.user.actor
        )


def _list(services: Services, tenant: TenantInfo) -> SourceList:
    policy = services.backends.sources.policy
    by_call = [GrantedSource(s, c, "registry") for s, c in sorted(tenant.sources.items())]
    by_file = [
        GrantedSource(grant.source, grant.credential, "file")
        for grant in policy.grants
        if grant.tenant == tenant.name
    ]
    return SourceList([*by_call, *by_file], sorted(policy.credentials), policy.public_sources)
