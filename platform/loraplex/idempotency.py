"""The `Idempotency-Key` header: a call that may be sent again without being done again."""

import re
from typing import Any

from litestar.connection import Request

from loraplex.errors import InvalidRequest

HEADER = "Idempotency-Key"
REPLAYED = {"idempotent-replayed": "true"}
"""On a reply that an earlier call with the same key got."""
IDEMPOTENCY_HEADERS = {HEADER: "The same key within 24 hours: the same reply, and nothing is done."}
"""For the OpenAPI page."""
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def idempotency_key(request: Request[Any, Any, Any]) -> str | None:
    """Return the call's key, None without one; raises `InvalidRequest`."""
    key = request.headers.get(HEADER)
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidRequest(
            HEADER, f"`{HEADER}` must be 1 to 255 visible ASCII characters",
            code="invalid_idempotency_key",
        )  # fmt: skip
    return key
