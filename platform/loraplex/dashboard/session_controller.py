"""`/dashboard/api/session`: log in with a key, see who one is, log out."""

import math
from typing import Any

from litestar import Controller, Request, Response, delete, get, post
from litestar.datastructures import Cookie
from litestar.di import NamedDependency

from loraplex.auth import PUBLIC
from loraplex.dashboard.access import COOKIE, provide_viewer, require_same_origin, require_session
from loraplex.dashboard.progress_query import progress
from loraplex.dashboard.sessions import SESSION_SECONDS, Viewer
from loraplex.dashboard.views import Login, Session
from loraplex.errors import ApiError, Forbidden, Unauthenticated
from loraplex.json_body import read_struct
from loraplex.services import Services
from loraplex.version import service_version

MAX_FAILED_LOGINS = 10
"""A minute, of one address."""


class SessionController(Controller):
    """Not for `Authorization`: the cookie is what a session is known by."""

    path = "/dashboard/api/session"
    opt = PUBLIC
    include_in_schema = False

    @post(status_code=200)
    async def log_in(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services]
    ) -> Response[Session]:
        """Show a key once; the cookie stands for it from then on."""
        is_https = require_same_origin(request)
        login = await read_struct(request, Login, services.settings.requests)
        address = request.client.host if request.client is not None else ""
        charge = await services.backends.rates.take(
            f"dashboard-login/{address}", MAX_FAILED_LOGINS, 1
        )
        if not charge.is_granted:
            wait = math.ceil(charge.window.seconds_until(charge.limit - 1))
            raise ApiError(
                429, "login_rate_exceeded", "too many failed logins; try again in a minute",
                headers={"retry-after": str(max(1, min(wait, 120)))},
            )  # fmt: skip
        key = login.key.strip()
        try:
            caller = await services.authenticator.authenticate(f"Bearer {key}")
        except Unauthenticated:
            raise ApiError(401, "invalid_api_key", "this key is not, or no longer, good") from None
        except Forbidden:
            await services.backends.rates.give_back(charge, 1)
            raise
        token, viewer = await services.sessions.log_in(caller, key)
        await services.backends.rates.give_back(charge, 1)
        return Response(
            await _session(services, viewer),
            cookies=[_cookie(token, SESSION_SECONDS, is_https=is_https)],
        )

    @get(before_request=require_session)
    async def show(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services]
    ) -> Session:
        """Who is logged in."""
        return await _session(services, provide_viewer(request))

    @delete(before_request=require_session)
    async def log_out(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services]
    ) -> Response[None]:
        """End the session, here and in all other windows."""
        is_https = require_same_origin(request)
        await services.sessions.log_out(provide_viewer(request))
        return Response(None, status_code=204, cookies=[_cookie("", 0, is_https=is_https)])


async def _session(services: Services, viewer: Viewer) -> Session:
    objective = (await services.backends.registry.database.read(progress)).objective
    return Session(
        tenant=viewer.tenant,
        is_admin=viewer.is_admin,
        expires=viewer.expires,
        base_model=services.model_name,
        version=service_version(),
        slo_ttft_seconds=objective.ttft,
        slo_token_seconds=objective.seconds_per_token,
    )


def _cookie(token: str, seconds: int, *, is_https: bool) -> Cookie:
    return Cookie(
        key=COOKIE, value=token, path="/dashboard", max_age=seconds, secure=is_https,
        httponly=True, samesite="strict",
    )  # fmt: skip
