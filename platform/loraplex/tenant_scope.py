"""Whose models and adapters a call is about: the key's tenant, or the one in the path."""

from typing import Any

from litestar.connection import Request
from litestar.di import NamedDependency

from adapter_store.errors import TenantNotFound
from adapter_store.registry.records import TenantInfo
from loraplex.auth import Caller
from loraplex.errors import Forbidden
from loraplex.services import Services


async def provide_tenant(
    request: Request[Caller, None, Any], services: NamedDependency[Services]
) -> TenantInfo:
    """Return the tenant; an unknown and a foreign one raise the same `TenantNotFound`.

    An admin acts for a tenant only under `/t/{tenant}/`.
    """
    caller = request.user
    name = request.path_params.get("tenant_name")
    if name is None:
        if caller.tenant is None:
            raise Forbidden(
                "tenant_required",
                "this is an admin's key, which belongs to no tenant: put the tenant before the "
                "path, as in /t/{tenant}/v1/models",
            )
        return caller.tenant
    if caller.tenant is not None and caller.tenant.name == name:
        return caller.tenant
    if not caller.is_admin:
        raise tenant_not_found()
    try:
        return await services.backends.registry.get_tenant(name)
    except TenantNotFound:
        raise tenant_not_found() from None


def tenant_not_found() -> TenantNotFound:
    """Return the one answer for unknown and foreign tenants."""
    return TenantNotFound("no such tenant, or not one that this key belongs to")
