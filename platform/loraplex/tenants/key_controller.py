"""`/admin/tenants/{tenant}/keys`: create, list, rotate and revoke a tenant's keys."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
from litestar import Controller, delete, get, post
from litestar.connection import Request
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import Meta

from adapter_store.registry.records import CreatedKey as NewKey
from adapter_store.registry.records import KeyInfo, Scope
from loraplex.auth import Caller, requires_admin
from loraplex.json_body import read_struct
from loraplex.openapi import Problem, errors, json_body
from loraplex.paging import DEFAULT_LIMIT, PageAfter, PageLimit, cut
from loraplex.services import Services

_ERRORS = errors(Problem, 400, 401, 403, 404, 503)
MAX_OVERLAP_SECONDS = 90 * 86_400
DEFAULT_OVERLAP_SECONDS = 3600


class KeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new key of a tenant."""

    scopes: Annotated[list[Scope], Meta(min_length=1)] | None = None
    """Default: `inference`."""
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None
    """With a time zone; default: never."""


class KeyRotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a key gives way to its successor."""

    overlap_seconds: Annotated[int, Meta(ge=0, le=MAX_OVERLAP_SECONDS)] = DEFAULT_OVERLAP_SECONDS
    """For so long the old key works on."""
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None
    """The new key's end; default: after as long a life as the old key was given."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret; `hint` is for recognising it."""

    id: str
    hint: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    """To about a minute."""


class CreatedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key. `key` is shown this once."""

    key: str
    id: str
    tenant: str
    scopes: list[str]
    expires_at: datetime | None


class KeyList(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of keys, oldest first. `next` is the `after` of the next page, if there is one."""

    data: list[Key]
    next: str | None = None


class KeyController(Controller):
    """The keys of a tenant."""

    path = "/admin/tenants/{tenant_name:str}/keys"
    guards = (requires_admin,)
    tags = ("admin",)

    @post(operation_id="createKey", operation_class=json_body(KeyCreate), responses=_ERRORS)
    async def create(
        self,
        request: Request[Caller, None, Any],
        tenant_name: FromPath[str],
        services: NamedDependency[Services],
    ) -> CreatedKey:
        """Create a key of a tenant; it is shown in this reply only."""
        wanted = await read_struct(request, KeyCreate, services.settings.requests)
        return _created(
            tenant_name,
            await services.backends.registry.create_key(
                tenant_name,
                wanted.scopes or ("inference",),
                wanted.expires_at,
                actor=request.user.actor,
            ),
        )

    @get(operation_id="listKeys", responses=_ERRORS)
    async def list(
        self,
        tenant_name: FromPath[str],
        services: NamedDependency[Services],
        limit: PageLimit = DEFAULT_LIMIT,
        after: PageAfter = "",
    ) -> KeyList:
        """List a tenant's keys, revoked ones too, a page at a time; never the keys themselves."""
        found = await services.backends.registry.list_keys(tenant_name, limit + 1, after)
        return key_page(found, limit)

    @post(
        "/{key_id:str}/rotate",
        operation_id="rotateKey",
        operation_class=json_body(KeyRotation),
        responses={**_ERRORS, **errors(Problem, 409)},
    )
    async def rotate(
        self,
        request: Request[Caller, None, Any],
        tenant_name: FromPath[str],
        key_id: FromPath[str],
        services: NamedDependency[Services],
    ) -> CreatedKey:
        """Create a key's successor with the same scopes; the old one ends after the overlap."""
        wanted = await read_struct(request, KeyRotation, services.settings.requests)
        return _created(
            tenant_name,
            await services.backends.registry.rotate_key(
                key_id,
                timedelta(seconds=wanted.overlap_seconds),
                wanted.expires_at,
                tenant=tenant_name,
                actor=request.user.actor,
            ),
        )

    @delete("/{key_id:str}", operation_id="revokeKey", responses=_ERRORS)
    async def revoke(
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


def _created(tenant: str, created: NewKey) -> CreatedKey:
    return CreatedKey(
        key=created.plain,
        id=created.key_id,
        tenant=tenant,
        scopes=sorted(created.info.scopes),
        expires_at=created.info.expires_at,
    )


def key_page(found: Sequence[KeyInfo], limit: int) -> KeyList:
    """Return the page of `limit + 1` keys asked for, for the client."""
    page, has_more = cut(found, limit)
    return KeyList([_key(key) for key in page], page[-1].key_id if has_more else None)


def _key(key: KeyInfo) -> Key:
    return Key(
        id=key.key_id,
        hint=key.hint,
        scopes=sorted(key.scopes),
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
    )
