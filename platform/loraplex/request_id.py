"""The id of a request: ours by default; a client's own is a label that comes back to it."""

import re
import uuid
from typing import cast

from litestar.types import Message, Scope

HEADER = b"x-request-id"
_LABEL = re.compile(rb"[\x21-\x7e]{1,128}")
_KEY = "request_id"


def request_id(scope: Scope) -> str:
    """Return what `x-request-id` says in the reply: the client's own label, or our id."""
    state = scope["state"]
    if _KEY not in state:
        label = next((value for name, value in scope["headers"] if name == HEADER), b"")
        state[_KEY] = (
            label.decode("ascii") if _LABEL.fullmatch(label) else f"req_{uuid.uuid4().hex}"
        )
    return cast(str, state[_KEY])


async def add_request_id(message: Message, scope: Scope) -> None:
    """Litestar `before_send` hook: put the id on every reply, errors included."""
    if message["type"] == "http.response.start":
        headers = [*message.get("headers", ()), (HEADER, request_id(scope).encode("ascii"))]
        message["headers"] = headers
