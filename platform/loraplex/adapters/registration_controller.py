"""`/v1/registrations`: how registrations by reference are going. They begin at `/v1/adapters`."""

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Controller, get
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response import Response
from msgspec import Meta

from adapter_store.model_ref import check_adapter_name
from adapter_store.references.reference import parse_reference
from adapter_store.registry.records import TenantInfo
from adapter_store.registry.registrations import RegistrationInfo, State
from loraplex.adapters.by_reference import Order, fetch_and_publish
from loraplex.adapters.serving import serving_of
from loraplex.adapters.upload import MAX_TEMPLATE_BYTES
from loraplex.auth import Caller, requires_tenant_scope
from loraplex.idempotency import idempotency_key
from loraplex.json_body import decode, read_capped
from loraplex.openapi import OpenAIError, errors, operation
from loraplex.paging import DEFAULT_LIMIT, PageAfter, PageLimit, cut
from loraplex.services import Services

_MAX_BODY_BYTES = 192 * 2**10
_ERRORS = errors(OpenAIError, 400, 401, 403, 404, 503)


class RegistrationOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter to fetch: hf://org/name@revision, s3://bucket/prefix or file:///folder."""

    name: str
    source: str
    publish: bool = True
    chat_template: Annotated[str, Meta(max_length=MAX_TEMPLATE_BYTES)] | None = None
    """Jinja, in place of the model's own."""
    stop_tokens: list[str] | None = None
    """Tokens that end every reply."""
    defaults: dict[str, Any] | None = None
    """Sampling parameters where a request names none, by their names."""


class RegistrationFailure(msgspec.Struct, frozen=True):
    """Why a registration failed; `code` is stable, `param` names the field at fault."""

    code: str
    message: str
    param: str | None


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A registration by reference: `ready` with a version, `failed` with an error, or under way."""

    id: str
    url: str
    """Where to ask how it is going."""
    name: str
    source: str
    state: State
    received_bytes: int
    total_bytes: int | None
    """Of both files, once the source has said it."""
    version: int | None
    digest: str | None
    unchanged: bool | None
    """Whether the newest version had the same files already."""
    error: RegistrationFailure | None
    created_at: datetime
    updated_at: datetime


class RegistrationList(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of a tenant's registrations, newest first. `next` is the `after` of the next page, if
    any."""

    data: list[Registration]
    next: str | None = None


class RegistrationController(Controller):
    """A tenant's registrations by reference."""

    path = "/v1/registrations"
    guards = (requires_tenant_scope,)
    tags = ("adapters",)

    @get(operation_id=operation("listRegistrations"), responses=_ERRORS)
    async def list(
        self,
        request: Request[Caller, None, Any],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
        limit: PageLimit = DEFAULT_LIMIT,
        after: PageAfter = "",
    ) -> RegistrationList:
        """List the tenant's registrations by reference, newest first, a page at a time."""
        found = await services.registrar.registrations.newest(tenant.name, limit + 1, after)
        page, has_more = cut(found, limit)
        return RegistrationList(
            [_shown(info, request.path_params) for info in page],
            page[-1].registration_id if has_more else None,
        )

    @get("/{registration_id:str}", operation_id=operation("getRegistration"), responses=_ERRORS)
    async def show(
        self,
        request: Request[Caller, None, Any],
        registration_id: FromPath[str],
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
    ) -> Registration:
        """Show how a registration by reference is going, or how it ended."""
        found = await services.registrar.registrations.get(tenant.name, registration_id)
        return _shown(found, request.path_params)


async def begin_registration(
    request: Request[Caller, None, Any], services: Services, tenant: TenantInfo
) -> Response[Registration]:
    """Take on what the body of a call names; the reply is a 202 with the URL of its progress."""
    body = await read_capped(request, services.settings.requests, _MAX_BODY_BYTES)
    wanted = decode(body or b"{}", RegistrationOrder)
    check_adapter_name(wanted.name, services.base_names)
    is_admin = request.user.is_admin
    reference = parse_reference(wanted.source)
    services.backends.sources.check(reference, tenant.name, tenant.sources, is_admin=is_admin)
    serving = await serving_of(
        services, tenant.name, wanted.chat_template, _as_json(wanted.stop_tokens),
        _as_json(wanted.defaults),
    )  # fmt: skip
    order = Order(
        tenant=tenant,
        name=wanted.name,
        reference=reference,
        publish=wanted.publish,
        is_admin=is_admin,
        actor=request.user.actor,
        idempotency_key=idempotency_key(request),
        serving=serving,
    )
    begun = await services.registrar.begin(
        tenant.name, wanted.name, reference, partial(fetch_and_publish, services, order)
    )
    shown = _shown(begun, request.path_params)
    return Response(shown, status_code=202, headers={"location": shown.url})


def _as_json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def _shown(info: RegistrationInfo, path_params: Mapping[str, Any]) -> Registration:
    tenant = path_params.get("tenant_name")
    prefix = "" if tenant is None else f"/t/{tenant}"
    error = None
    if info.error_code is not None:
        error = RegistrationFailure(info.error_code, info.error_message or "", info.error_field)
    return Registration(
        id=info.registration_id,
        url=f"{prefix}/v1/registrations/{info.registration_id}",
        name=info.name,
        source=info.source,
        state=info.state,
        received_bytes=info.received_bytes,
        total_bytes=info.total_bytes,
        version=info.version,
        digest=info.digest,
        unchanged=None if info.is_new is None else not info.is_new,
        error=error,
        created_at=info.created_at,
        updated_at=info.updated_at,
    )
