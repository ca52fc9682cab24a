"""`/v1/adapters/{name}/aliases/{alias}`: move and delete."""

from typing import Any

from litestar import Controller, delete, put
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response import Response

from adapter_store.registry.records import Canary, TenantInfo
from loraplex.adapters import schemas
from loraplex.auth import Caller, requires_tenant_scope
from loraplex.idempotency import IDEMPOTENCY_HEADERS, REPLAYED, idempotency_key
from loraplex.json_body import read_struct
from loraplex.openapi import OpenAIError, errors, json_body, operation
from loraplex.services import Services

_ERRORS = errors(OpenAIError, 400, 401, 403, 404, 503)


class AliasController(Controller):
    """An alias of an adapter."""

    path = "/v1/adapters/{name:str}/aliases/{alias:str}"
    guards = (requires_tenant_scope,)
    tags = ("adapters",)

    @put(
        operation_id=operation("moveAlias"),
        operation_class=json_body(schemas.AliasMove, headers=IDEMPOTENCY_HEADERS),
        responses={**_ERRORS, **errors(OpenAIError, 409, 422)},
    )
    async def move(
        self,
        request: Request[Caller, None, Any],
        name: FromPath[str],
        alias: FromPath[str],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> Response[schemas.Alias]:
        """Point an alias at a version, atomically, and a share of its requests at a canary."""
        key = idempotency_key(request)
        move = await read_struct(request, schemas.AliasMove, services.settings.requests)
        change = await services.backends.registry.set_alias(
            tenant.name,
            name,
            alias,
            move.version,
            expect=move.expect,
            canary=move.canary and Canary(move.canary.version, move.canary.share),
            idempotency_key=key,
            actor=request.user.actor,
        )
        await services.residency.refresh()
        return Response(schemas.alias(change), headers=REPLAYED if change.replayed else None)

    @delete(operation_id=operation("deleteAlias"), responses=_ERRORS)
    async def remove(
        self,
        request: Request[Caller, None, Any],
        name: FromPath[str],
        alias: FromPath[str],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> None:
        """Delete an alias; the versions that it pointed to stay."""
        await services.backends.registry.delete_alias(
            tenant.name, name, alias, actor=request.user.actor
        )
        await services.residency.refresh()
