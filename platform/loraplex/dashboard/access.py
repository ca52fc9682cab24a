"""Who may read `/dashboard/api/…`, and what every answer under `/dashboard` says to a browser."""

from typing import Any
from urllib.parse import urlsplit

from litestar.connection import Request
from litestar.types import Message, Scope

from loraplex.dashboard.pages import SECURITY_HEADERS
from loraplex.dashboard.sessions import Viewer
from loraplex.errors import Forbidden
from loraplex.services import Services

COOKIE = "loraplex_session"
_ROOT = "/dashboard"
_API = "/dashboard/api/"
_VIEWER = "dashboard_viewer"


async def require_session(request: Request[Any, Any, Any]) -> None:
    """Litestar `before_request` hook: put the `Viewer` on the request, or answer 401.

    The cookie is looked at here and nowhere else: to `/v1` and `/admin` it is nothing.
    """
    services: Services = request.app.state.services
    viewer = await services.sessions.viewer(request.cookies.get(COOKIE))
    request.scope["state"][_VIEWER] = viewer


def provide_viewer(request: Request[Any, Any, Any]) -> Viewer:
    """Return whom `require_session` found."""
    viewer: Viewer = request.scope["state"][_VIEWER]
    return viewer


def require_same_origin(request: Request[Any, Any, Any]) -> bool:
    """Refuse what another site's page sends; returns whether the browser is on https.

    Behind a proxy that ends TLS our own scheme is http: the browser's is in its `Origin`, whose
    host must be the one that it asked for.
    """
    origin = urlsplit(request.headers.get("origin", ""))
    if origin.scheme not in ("http", "https") or origin.netloc != request.headers.get("host"):
        raise Forbidden("origin_mismatch", "this comes from a page of another site, or from none")
    return origin.scheme == "https"


async def add_security_headers(message: Message, scope: Scope) -> None:
    """Litestar `before_send` hook: on all answers under `/dashboard`, errors included."""
    path = scope["path"]
    if message["type"] != "http.response.start" or not (
        path == _ROOT or path.startswith(_ROOT + "/")
    ):
        return
    wanted = dict(SECURITY_HEADERS)
    if path.startswith(_API):
        wanted["cache-control"] = "no-store"
    headers = list(message.get("headers", ()))
    known = {name.lower() for name, _ in headers}
    message["headers"] = [
        *headers,
        *(
            (name.encode(), value.encode())
            for name, value in wanted.items()
            if name.encode() not in known
        ),
    ]
