"""`/`: a browser comes to the dashboard, a program is told where things are. No key is asked."""

from typing import Any

from litestar import Request, Response, get
from litestar.response import Redirect
from litestar.status_codes import HTTP_303_SEE_OTHER

from loraplex.auth import PUBLIC

PLACES = {
    "dashboard": "/dashboard",
    "docs": "/docs",
    "openapi": "/docs/openapi.json",
    "openai": "/v1",
    "health": "/health",
}


@get("/", opt=PUBLIC, include_in_schema=False, sync_to_thread=False)
def front_door(request: Request[Any, Any, Any]) -> Response[Any]:
    """Answer by what the client would rather have."""
    headers = {"vary": "accept"}
    if "text/html" in request.headers.get("accept", ""):
        return Redirect("/dashboard", status_code=HTTP_303_SEE_OTHER, headers=headers)
    return Response(PLACES, media_type="application/json", headers=headers)
