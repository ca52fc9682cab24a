"""`/v1/adapters/{name}/versions/{version}`: show, export, delete."""

from typing import Annotated, Any

from litestar import Controller, delete, get
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from litestar.response import Stream

from adapter_store.registry.records import TenantInfo
from loraplex.adapters import schemas
from loraplex.adapters.export import export_version
from loraplex.adapters.publishing import adapter_is_gone, has_adapter, remove_unused
from loraplex.adapters.servable import state_of
from loraplex.auth import Caller, requires_tenant_scope
from loraplex.ending_calls import end_calls_of_adapter
from loraplex.openapi import OpenAIError, errors, operation
from loraplex.services import Services

_ERRORS = errors(OpenAIError, 400, 401, 403, 404, 503)

Abort = Annotated[bool, QueryParameter(description="End the requests that run on it, too.")]


class VersionController(Controller):
    """One version of an adapter."""

    path = "/v1/adapters/{name:str}/versions/{version:int}"
    guards = (requires_tenant_scope,)
    tags = ("adapters",)

    @get(operation_id=operation("getAdapterVersion"), responses=_ERRORS)
    async def show(
        self,
        name: FromPath[str],
        version: FromPath[int],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> schemas.Version:
        """Show a version with its conformance report."""
        registry = services.backends.registry
        found = await registry.get_version(tenant.name, name, version)
        return schemas.version(found, state_of(services, found))

    @get(
        "/export",
        operation_id=operation("exportAdapterVersion"),
        responses={**_ERRORS, **errors(OpenAIError, 429)},
        media_type="application/zip",
    )
    async def export(
        self,
        name: FromPath[str],
        version: FromPath[int],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> Stream:
        """Download a version: a zip of its two files, as they came, and a manifest."""
        await services.limiter.admit_aside(tenant)
        registry = services.backends.registry
        return await export_version(
            services, tenant.name, await registry.get_version(tenant.name, name, version)
        )

    @delete(
        operation_id=operation("deleteAdapterVersion"),
        responses={**_ERRORS, **errors(OpenAIError, 409)},
    )
    async def remove(
        self,
        request: Request[Caller, None, Any],
        name: FromPath[str],
        version: FromPath[int],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
        abort: Abort = False,
    ) -> None:
        """Delete a version that no alias points to; requests under way finish on it."""
        unused = await services.backends.registry.delete_version(
            tenant.name, name, version, actor=request.user.actor
        )
        if abort:
            end_calls_of_adapter(services.backends.engine, tenant.name, name, version)
        if await has_adapter(services, tenant.name, name):
            await remove_unused(services, unused)
        else:  # it was the last version
            await adapter_is_gone(services, tenant.name, name, unused)
