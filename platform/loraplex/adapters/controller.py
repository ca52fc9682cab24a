"""`/v1/adapters`: upload, list, show, delete, and keep resident."""

from pathlib import Path
from typing import Any

from litestar import Controller, delete, get, post, put
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath
from litestar.response import Response

from adapter_store.model_ref import check_adapter_name
from adapter_store.registry.records import TenantInfo
from loraplex.adapters import schemas
from loraplex.adapters.publishing import (
    check_serves_adapters,
    delete_adapter,
    publish,
    upload_folder,
)
from loraplex.adapters.registration_controller import (
    Registration,
    RegistrationOrder,
    begin_registration,
)
from loraplex.adapters.residency import check_may_change, limits_of
from loraplex.adapters.servable import state_of
from loraplex.adapters.serving import read_serving
from loraplex.adapters.upload import receive_upload
from loraplex.adapters.version_controller import Abort
from loraplex.auth import Caller, authenticate_again, requires_tenant_scope
from loraplex.idempotency import IDEMPOTENCY_HEADERS, REPLAYED, idempotency_key
from loraplex.json_body import read_struct
from loraplex.openapi import OpenAIError, errors, json_body, multipart_body, operation
from loraplex.paging import DEFAULT_LIMIT, PageAfter, PageLimit, cut
from loraplex.services import Services

_ERRORS = errors(OpenAIError, 400, 401, 403, 404, 503)
_UPLOAD = multipart_body(
    {
        "name": {"type": "string", "description": "The adapter's name."},
        "publish": {"type": "boolean", "default": True, "description": "Move `default` to it."},
        "config": {"type": "string", "format": "binary", "description": "adapter_config.json"},
        "weights": {
            "type": "string",
            "format": "binary",
            "description": "adapter_model.safetensors",
        },
        "archive": {
            "type": "string",
            "format": "binary",
            "description": "A zip of both, instead of `config` and `weights`.",
        },
        "chat_template": {
            "type": "string",
            "description": "Jinja, in place of the model's own; 64 KiB at most.",
        },
        "stop_tokens": {
            "type": "string",
            "description": "JSON: a list of tokens that end every reply.",
        },
        "defaults": {
            "type": "string",
            "description": "JSON: sampling parameters where a request names none, by their names.",
        },
    },
    required=["name"],
    headers=IDEMPOTENCY_HEADERS,
    or_json=RegistrationOrder,
)


class AdapterController(Controller):
    """A tenant's adapters."""

    path = "/v1/adapters"
    guards = (requires_tenant_scope,)
    tags = ("adapters",)

    @post(
        operation_id=operation("uploadAdapter"),
        operation_class=_UPLOAD,
        responses={
            **_ERRORS,
            200: ResponseSpec(schemas.UploadReply, description="The newest version is the same."),
            202: ResponseSpec(Registration, description="A reference: see `url` for its progress."),
            **errors(OpenAIError, 408, 409, 413, 422),
        },
        request_max_body_size=None,
    )
    async def upload(
        self,
        request: Request[Caller, None, Any],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> Response[schemas.UploadReply] | Response[Registration]:
        """Make a PEFT adapter the next version of a name: uploaded as a form, or, as JSON with a
        `name` and a `source`, fetched from where that says."""
        check_serves_adapters(services)
        settings = services.settings
        if request.content_type[0] == "application/json":
            return await begin_registration(request, services, tenant)
        key = idempotency_key(request)
        max_rank = services.backends.engine.info.max_lora_rank
        async with upload_folder(Path(settings.storage.uploads_dir)) as folder:
            upload = await receive_upload(
                request,
                folder,
                settings.uploads,
                lambda name: check_adapter_name(name, services.base_names),
            )
            await authenticate_again(request)
            serving = await read_serving(services, tenant.name, upload)
            registered = await publish(
                services,
                tenant,
                upload,
                folder,
                serving=serving,
                max_rank=max_rank,
                actor=request.user.actor,
                idempotency_key=key,
            )
        await services.residency.refresh()
        return Response(
            schemas.upload_reply(registered),
            status_code=201 if registered.created else 200,
            headers=REPLAYED if registered.replayed else None,
        )

    @get(operation_id=operation("listAdapters"), responses=_ERRORS)
    async def list(
        self,
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
        limit: PageLimit = DEFAULT_LIMIT,
        after: PageAfter = "",
    ) -> schemas.AdapterList:
        """List the tenant's adapters by name, a page at a time."""
        registry = services.backends.registry
        found = await registry.list_adapters(tenant.name, limit + 1, after)
        page, has_more = cut(found, limit)
        return schemas.AdapterList(
            [schemas.adapter(info) for info in page], page[-1].name if has_more else None
        )

    @get("/{name:str}", operation_id=operation("getAdapter"), responses=_ERRORS)
    async def show(
        self,
        name: FromPath[str],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> schemas.Adapter:
        """Show an adapter and its aliases."""
        return schemas.adapter(await services.backends.registry.get_adapter(tenant.name, name))

    @delete("/{name:str}", operation_id=operation("deleteAdapter"), responses=_ERRORS)
    async def remove(
        self,
        request: Request[Caller, None, Any],
        name: FromPath[str],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
        abort: Abort = False,
    ) -> None:
        """Delete an adapter with all its versions; requests under way finish on theirs."""
        await delete_adapter(
            services, tenant.name, name, actor=request.user.actor, ends_calls=abort
        )

    @get(
        "/{name:str}/versions",
        operation_id=operation("listAdapterVersions"),
        responses=_ERRORS,
    )
    async def list_versions(
        self,
        name: FromPath[str],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
        limit: PageLimit = DEFAULT_LIMIT,
        after: PageAfter = "",
    ) -> schemas.VersionList:
        """List an adapter's versions, newest first, a page at a time."""
        registry = services.backends.registry
        found = await registry.list_versions(tenant.name, name, limit + 1, after)
        page, has_more = cut(found, limit)
        return schemas.VersionList(
            [schemas.version(info, state_of(services, info)) for info in page],
            str(page[-1].version) if has_more else None,
        )

    @put(
        "/{name:str}/residency",
        operation_id=operation("setAdapterResidency"),
        operation_class=json_body(schemas.ResidencyChange),
        responses={**_ERRORS, **errors(OpenAIError, 409)},
    )
    async def set_residency(
        self,
        request: Request[Caller, None, Any],
        name: FromPath[str],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> schemas.Adapter:
        """Pin an adapter to a slot (admins only), keep it warm in host memory, or neither."""
        change = await read_struct(request, schemas.ResidencyChange, services.settings.requests)
        registry = services.backends.registry
        current = await registry.get_adapter(tenant.name, name)
        check_may_change(request.user, current.residency, change.residency)
        changed = await registry.set_residency(
            tenant.name,
            name,
            change.residency,
            limits_of(services.backends.engine.info),
            actor=request.user.actor,
        )
        await services.residency.refresh()
        return schemas.adapter(changed)
