"""vLLM's calls for adapters: `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from typing import Any

import msgspec
from litestar import Controller, post
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.enums import MediaType

from adapter_store.model_ref import check_adapter_name
from adapter_store.references.reference import parse_reference
from adapter_store.registry.records import TenantInfo
from loraplex.adapters.by_reference import Order, fetch_and_publish
from loraplex.adapters.publishing import (
    check_serves_adapters,
    delete_adapter,
    has_adapter,
)
from loraplex.adapters.registrar import RegistrationProgress
from loraplex.auth import Caller, requires_tenant_scope
from loraplex.errors import ApiError, InvalidRequest
from loraplex.json_body import read_struct
from loraplex.openapi import OpenAIError, errors, json_body, operation
from loraplex.services import Services

_ERRORS = errors(OpenAIError, 400, 401, 403, 404, 409, 422, 503)


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's fields; `lora_int_id` and the like are ignored."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Whether an adapter of this name gets a new version; else it is an error."""


class UnloadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's fields."""

    lora_name: str


class VllmAdapterController(Controller):
    """For tools that were written for vLLM. What is loaded lies in the registry like an upload."""

    path = "/v1"
    guards = (requires_tenant_scope,)
    tags = ("adapters",)

    @post(
        "/load_lora_adapter",
        operation_id=operation("loadLoraAdapter"),
        operation_class=json_body(LoadOrder),
        responses=_ERRORS,
        media_type=MediaType.TEXT,
        status_code=200,
    )
    async def load(
        self,
        request: Request[Caller, None, Any],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> str:
        """Publish a folder of the service's machine that lies under an `--adapter-root`; as with
        any `file://` source, only an admin may, under `/t/{tenant}`."""
        check_serves_adapters(services)
        order = await read_struct(request, LoadOrder, services.settings.requests)
        name = order.lora_name
        check_adapter_name(name, services.base_names)
        if not order.lora_path.startswith("/"):
            raise InvalidRequest("lora_path", "`lora_path` must be an absolute path")
        reference = parse_reference(f"file://{order.lora_path}")
        is_admin = request.user.is_admin
        services.backends.sources.check(reference, tenant.name, tenant.sources, is_admin=is_admin)
        if not order.load_inplace and await has_adapter(services, tenant.name, name):
            raise ApiError(
                400,
                "adapter_exists",
                f"there is an adapter {name!r}: set `load_inplace` to give it a new version",
                param="lora_name",
            )
        wanted = Order(
            tenant=tenant,
            name=name,
            reference=reference,
            publish=True,
            is_admin=is_admin,
            actor=request.user.actor,
        )
        await fetch_and_publish(services, wanted, RegistrationProgress())
        return f"Success: LoRA adapter '{name}' added successfully."

    @post(
        "/unload_lora_adapter",
        operation_id=operation("unloadLoraAdapter"),
        operation_class=json_body(UnloadOrder),
        responses=_ERRORS,
        media_type=MediaType.TEXT,
        status_code=200,
    )
    async def unload(
        self,
        request: Request[Caller, None, Any],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> str:
        """Delete an adapter with all its versions; requests under way finish on theirs."""
        order = await read_struct(request, UnloadOrder, services.settings.requests)
        await delete_adapter(services, tenant.name, order.lora_name, actor=request.user.actor)
        return f"Success: LoRA adapter '{order.lora_name}' removed successfully."
