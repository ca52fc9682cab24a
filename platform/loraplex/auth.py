"""Who calls, and what they may: deny by default.

`AuthMiddleware` stands before every route; only handlers with the option `exclude_from_auth`
answer without a key. Guards then look at scopes, never at the database.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.handlers import BaseRouteHandler
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult

from adapter_store.registry.records import TenantInfo
from adapter_store.registry.registry import Registry
from loraplex.errors import Forbidden, Unauthenticated

PUBLIC = {"exclude_from_auth": True}
"""The `opt` of a handler that answers without a key."""

_MAX_KEY_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever holds the key. `actor` names it in the audit."""

    actor: str
    tenant: TenantInfo | None
    scopes: frozenset[str]

    @property
    def is_admin(self) -> bool:
        """Whether it may do everything; never true of a tenant's own key."""
        return self.tenant is None and "admin" in self.scopes


ADMIN = Caller("admin", None, frozenset({"admin"}))


class Authenticator:
    """Verifies keys: the configured admin key in constant time, others in the registry."""

    def __init__(self, registry: Registry, admin_key: str | None) -> None:
        self._registry = registry
        self._admin_hash = _hash(admin_key) if admin_key is not None else None

    async def authenticate(self, authorization: str | None) -> Caller:
        """Return whom an `Authorization` header speaks for.

        Raises `Unauthenticated`, or `Forbidden` for a suspended tenant's key.
        """
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated(has_key=False)
        if len(key) > _MAX_KEY_LENGTH:
            raise Unauthenticated(has_key=True)
        if self._admin_hash is not None and hmac.compare_digest(_hash(key), self._admin_hash):
            return ADMIN
        principal = await self._registry.authenticate(key)
        if principal is None:
            raise Unauthenticated(has_key=True)
        if principal.tenant is not None and principal.tenant.suspended_at is not None:
            raise Forbidden("tenant_suspended", "this key's tenant is suspended")
        return Caller(principal.key_id, principal.tenant, principal.scopes)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class AuthMiddleware(AbstractAuthenticationMiddleware):
    """Puts the `Caller` on the connection, or answers 401."""

    async def authenticate_request(
        self, connection: ASGIConnection[BaseRouteHandler, Caller, None, State]
    ) -> AuthenticationResult:
        """Verify the `Authorization` header."""
        authenticator: Authenticator = connection.app.state.services.authenticator
        caller = await authenticator.authenticate(connection.headers.get("authorization"))
        return AuthenticationResult(user=caller, auth=None)


async def authenticate_again(request: ASGIConnection[Any, Any, Any, Any]) -> None:
    """Raise as `AuthMiddleware` does if a call has lost its right while its body came.

    A body may take its time; a revoked key, and a suspended tenant's, shall not be good till then.
    """
    if request.scope.get("user") is not None:
        services = request.app.state.services
        await services.authenticator.authenticate(request.headers.get("authorization"))


Connection = ASGIConnection[BaseRouteHandler, Caller, None, State]


def requires_admin(connection: Connection, _: BaseRouteHandler) -> None:
    """Only an admin may."""
    if not connection.user.is_admin:
        raise Forbidden("admin_required", "this needs an admin key")


def requires_tenant_scope(connection: Connection, _: BaseRouteHandler) -> None:
    """Only a key that manages its tenant's adapters, or an admin, may."""
    _require(connection.user, "tenant")


def requires_inference_scope(connection: Connection, _: BaseRouteHandler) -> None:
    """Only a key that may call models, or an admin, may."""
    _require(connection.user, "inference")


def requires_metrics_scope(connection: Connection, _: BaseRouteHandler) -> None:
    """Only a key that reads metrics, or an admin, may."""
    _require(connection.user, "metrics")


def requires_any_tenant_scope(connection: Connection, _: BaseRouteHandler) -> None:
    """Any key that calls models or manages adapters may, and so may an admin."""
    if "tenant" not in connection.user.scopes:
        _require(connection.user, "inference")


def _require(caller: Caller, scope: str) -> None:
    if not caller.is_admin and scope not in caller.scopes:
        raise Forbidden("insufficient_scope", f"this needs a key with the scope `{scope}`")
