"""Who is logged in to the dashboard: a key was shown once, and a random token stands for it.

The token is good for eight hours at most, and never longer than the key is. It lies in a cookie
that only `/dashboard` gets and no script reads; it opens nothing but the dashboard's pages.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from adapter_store.errors import KeyNotFound
from adapter_store.registry.logins import Login
from adapter_store.registry.registry import Registry
from loraplex.auth import ADMIN, Caller
from loraplex.errors import ApiError, Forbidden, Unauthenticated

SESSION_SECONDS = 8 * 3600
MAX_TOKEN_LENGTH = 64

SessionEnd = Literal["logged_out", "expired", "revoked", "stopping"]


@dataclass(frozen=True, slots=True)
class Viewer:
    """Whoever looks: at all, or at one tenant's."""

    token_hash: str
    tenant: str | None
    """None: an admin."""
    expires: float
    """Unix seconds."""

    @property
    def is_admin(self) -> bool:
        """Whether everything may be seen."""
        return self.tenant is None


class SessionRequired(ApiError):
    """No session, or none any more: the page shows its login."""

    def __init__(self) -> None:
        super().__init__(401, "session_required", "log in to the dashboard with a key first")


class Sessions:
    """Opens, checks and ends sessions; they lie in the registry, for all API processes."""

    def __init__(
        self,
        registry: Registry,
        admin_key: str | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`admin_key` is that of the settings: sessions of another one are over."""
        self._registry = registry
        self._admin_hash = None if admin_key is None else _hash(admin_key)
        self._clock = clock

    async def log_in(self, caller: Caller, key: str) -> tuple[str, Viewer]:
        """Begin a session for whoever holds a verified key; returns its token.

        Raises `Forbidden` for a key that manages nothing.
        """
        if not caller.is_admin and "tenant" not in caller.scopes:
            raise Forbidden(
                "insufficient_scope",
                "the dashboard needs a key with the scope `tenant`, or an admin's",
            )
        token = secrets.token_urlsafe(32)
        ends = datetime.fromtimestamp(self._clock(), UTC) + timedelta(seconds=SESSION_SECONDS)
        key_id = None if caller is ADMIN else caller.actor
        try:
            await self._registry.log_in(
                _hash(token), key_hash=_hash(key), key_id=key_id, expires_at=ends
            )
        except KeyNotFound:
            raise Unauthenticated(has_key=True) from None
        return token, await self.viewer(token)

    async def viewer(self, token: str | None) -> Viewer:
        """Whom a token stands for; raises `SessionRequired`."""
        if not token or len(token) > MAX_TOKEN_LENGTH:
            raise SessionRequired
        token_hash = _hash(token)
        login = (await self._registry.find_logins([token_hash])).get(token_hash)
        if self._end_of(login) is not None:
            raise SessionRequired
        assert login is not None
        return Viewer(token_hash, login.tenant, login.expires_at.timestamp())

    async def ended(self, token_hashes: Iterable[str]) -> dict[str, SessionEnd]:
        """Those of sessions that are over, and why: one statement for all of them."""
        hashes = list(token_hashes)
        found = await self._registry.find_logins(hashes)
        ended: dict[str, SessionEnd] = {}
        for token_hash in hashes:
            if (reason := self._end_of(found.get(token_hash))) is not None:
                ended[token_hash] = reason
        return ended

    async def log_out(self, viewer: Viewer) -> None:
        """End a session."""
        await self._registry.log_out(viewer.token_hash)

    def _end_of(self, login: Login | None) -> SessionEnd | None:
        if login is None:
            return "logged_out"
        if login.is_revoked or not self._is_current(login):
            return "revoked"
        return "expired" if login.expires_at.timestamp() <= self._clock() else None

    def _is_current(self, login: Login) -> bool:
        if login.key_id is not None:
            return True
        known = self._admin_hash
        return known is not None and hmac.compare_digest(known, login.key_hash)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
