"""`/admin/keys`: create, list and revoke the service's own keys, which belong to no tenant."""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, delete, get, post
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import Meta

from loraplex.auth import Caller, requires_admin
from loraplex.json_body import read_struct
from loraplex.openapi import Problem, errors, json_body
from loraplex.paging import DEFAULT_LIMIT, PageAfter, PageLimit
from loraplex.services import Services
from loraplex.tenants.key_controller import KeyList, key_page

_ERRORS = errors(Problem, 400, 401, 403, 503)


class AdminKeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new key of the service's own. With `metrics` alone it reads the metrics page, whole."""

    scopes: Annotated[list[Literal["admin", "metrics"]], Meta(min_length=1)] | None = None
    """Default: `admin`."""
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None
    """With a time zone; default: never."""


class CreatedAdminKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key. `key` is shown this once."""

    key: str
    id: str
    scopes: list[str]
    expires_at: datetime | None


class AdminKeyController(Controller):
    """The service's own keys."""

    path = "/admin/keys"
    guards = (requires_admin,)
    tags = ("admin",)

    @post(
        operation_id="createAdminKey", operation_class=json_body(AdminKeyCreate), responses=_ERRORS
    )
    async def create(
        self, request: Request[Caller, None, Any], services: NamedDependency[Services]
    ) -> CreatedAdminKey:
        """Create an admin key; it is shown in this reply only."""
        wanted = await read_struct(request, AdminKeyCreate, services.settings.requests)
        created = await services.backends.registry.create_key(
            None, wanted.scopes or ("admin",), wanted.expires_at, actor=request.user.actor
        )
        return CreatedAdminKey(
            key=created.plain,
            id=created.key_id,
            scopes=sorted(created.info.scopes),
            expires_at=created.info.expires_at,
        )

    @get(operation_id="listAdminKeys", responses=_ERRORS)
    async def list(
        self,
        services: NamedDependency[Services],
        limit: PageLimit = DEFAULT_LIMIT,
        after: PageAfter = "",
    ) -> KeyList:
        """List admin keys, revoked ones too, a page at a time. That of `LORAPLEX_ADMIN_KEY` is none
        of them."""
        found = await services.backends.registry.list_keys(None, limit + 1, after)
        return key_page(found, limit)

    @delete(
        "/{key_id:str}",
        operation_id="revokeAdminKey",
        responses={**_ERRORS, **errors(Problem, 404, 409)},
    )
    async def revoke(
        self,
        request: Request[Caller, None, Any],
        key_id: FromPath[str],
        services: NamedDependency[Services],
    ) -> None:
        """Revoke an admin key; the last one that works only if there is `LORAPLEX_ADMIN_KEY`."""
        await services.backends.registry.revoke_own_key(
            key_id,
            may_be_last=services.settings.auth.admin_key is not None,
            actor=request.user.actor,
        )
