"""`GET /v1/models` and `/v1/models/{model}`: what a tenant may call."""

from datetime import datetime
from typing import Literal

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from adapter_store.registry.records import TenantInfo
from loraplex.auth import requires_any_tenant_scope
from loraplex.openai.resolve import resolve_target
from loraplex.openapi import OpenAIError, errors, operation
from loraplex.services import Services

_ERRORS = errors(OpenAIError, 400, 401, 403, 404, 503)


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as OpenAI's clients know it. `parent` is the base model of an adapter."""

    id: str
    created: int
    owned_by: str
    parent: str | None = None
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True):
    """All that the tenant may call."""

    data: list[Model]
    object: Literal["list"] = "list"


class ModelsController(Controller):
    """The base model and the tenant's adapters."""

    path = "/v1/models"
    guards = (requires_any_tenant_scope,)
    tags = ("models",)

    @get(operation_id=operation("listModels"), responses=_ERRORS)
    async def list(
        self, services: NamedDependency[Services], tenant: NamedDependency[TenantInfo]
    ) -> ModelList:
        """List the base model's names and the tenant's adapters."""
        adapters = await services.backends.registry.list_adapters(tenant.name)
        bases = [_base(name, services) for name in services.served_names]
        return ModelList(
            [*bases, *(_adapter(a.name, a.created_at, tenant, services) for a in adapters)]
        )

    @get("/{model:path}", operation_id=operation("getModel"), responses=_ERRORS)
    async def show(
        self,
        model: FromPath[str],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> Model:
        """Describe a model by any string that requests may use for it."""
        asked = model.removeprefix("/")
        target = await resolve_target(services, tenant, asked)
        if target.adapter is None:
            return _base(asked, services)
        adapter = await services.backends.registry.get_adapter(tenant.name, target.adapter.name)
        return _adapter(asked, adapter.created_at, tenant, services)


def _base(name: str, services: Services) -> Model:
    return Model(id=name, created=services.started_at, owned_by="loraplex")


def _adapter(name: str, created_at: datetime, tenant: TenantInfo, services: Services) -> Model:
    return Model(
        id=name,
        created=int(created_at.timestamp()),
        owned_by=tenant.name,
        parent=services.model_name,
    )
