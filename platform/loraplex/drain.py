"""What a request is told that is still running when the drain limit is over."""

import asyncio

import msgspec
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.errors import is_openai_path, openai_body, problem_body, shutting_down

SERVER_SEND = "server_send"
"""In `scope["state"]`: the server's own `send`, without what the app wraps around it. A reply that
has begun may send its body with it: nothing that we wrap looks at bodies."""


def answering_when_cut(app: ASGIApp) -> ASGIApp:
    """Return the app with a 503 for requests that the server cancels, as uvicorn does at the end
    of a graceful stop; a reply that has begun just ends."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        scope["state"][SERVER_SEND] = send
        try:
            await app(scope, receive, watched)
        except asyncio.CancelledError:
            if not has_begun:
                await _send_shutting_down(scope["path"], send)

    return run


async def _send_shutting_down(path: str, send: Send) -> None:
    error = shutting_down()
    if is_openai_path(path):
        body, media_type = openai_body(error), b"application/json"
    else:
        body, media_type = problem_body(error), b"application/problem+json"
    content = msgspec.json.encode(body)
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [
                (b"content-type", media_type),
                (b"content-length", str(len(content)).encode()),
                *((name.encode(), value.encode()) for name, value in error.headers.items()),
                (b"connection", b"close"),
            ],
        }
    )
    await send({"type": "http.response.body", "body": content, "more_body": False})
