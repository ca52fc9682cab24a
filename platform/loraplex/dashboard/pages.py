"""`/dashboard`: the pages' files, read once at start. No key is asked for them: they hold no data.

All that a page shows it reads from `/dashboard/api/…`. Every path below `/dashboard` that is
neither a file nor a route of the API is the one document, which shows the page that the path names.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litestar import Request, Response, Router, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath
from litestar.status_codes import HTTP_200_OK, HTTP_304_NOT_MODIFIED

from loraplex.auth import PUBLIC

STATIC_DIR = Path(__file__).with_name("static")

SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none';"
        " object-src 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


@dataclass(frozen=True, slots=True)
class _Asset:
    content: bytes
    media_type: str
    etag: str


def dashboard_pages() -> Router:
    """Return the routes of the dashboard's document and files."""
    assets = _read_assets(STATIC_DIR)

    @get("/static/{name:path}", sync_to_thread=False)
    def file(name: FromPath[str], request: Request[Any, Any, Any]) -> Response[bytes]:
        asset = assets.get(name.removeprefix("/"))
        if asset is None:
            raise NotFoundException(f"the dashboard has no file {name}")
        return _answer(asset, request)

    @get(["/", "/{page:path}"], sync_to_thread=False)
    def document(request: Request[Any, Any, Any], page: FromPath[str] = "/") -> Response[bytes]:
        if page.startswith("/api/"):
            raise NotFoundException(f"the dashboard has no route {page}")
        return _answer(assets["index.html"], request)

    return Router(
        "/dashboard", route_handlers=[file, document], opt=PUBLIC, include_in_schema=False
    )


def _read_assets(folder: Path) -> Mapping[str, _Asset]:
    return {
        str(path.relative_to(folder)): _asset(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in _MEDIA_TYPES
    }


def _asset(path: Path) -> _Asset:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _Asset(content, _MEDIA_TYPES[path.suffix], etag)


def _answer(asset: _Asset, request: Request[Any, Any, Any]) -> Response[bytes]:
    """Always ask again (`no-cache`), mostly for a 304: a new release shows at once."""
    headers = {**SECURITY_HEADERS, "etag": asset.etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(b"", status_code=HTTP_304_NOT_MODIFIED, headers=headers)
    return Response(
        asset.content, status_code=HTTP_200_OK, media_type=asset.media_type, headers=headers
    )
