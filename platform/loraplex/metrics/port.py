"""`/metrics` on a loopback port of its own, without a key: for a Prometheus on the same host."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Generator

import uvicorn
from litestar.types import Receive, Scope, Send

from loraplex.metrics.page import MetricsPage


class MetricsApp:
    """A plain ASGI app with one page."""

    def __init__(self, get_page: Callable[[], MetricsPage | None]) -> None:
        """`get_page`: None while the service starts."""
        self._get_page = get_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `GET /metrics`; 404 for all else."""
        if scope["type"] != "http":
            return
        if scope["path"] != "/metrics" or scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 404, b"the metrics are at /metrics\n", "text/plain; charset=utf-8")
            return
        page = self._get_page()
        if page is None:
            await _answer(send, 503, b"the service starts\n", "text/plain; charset=utf-8")
            return
        accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
        rendered = await page.render(accept.decode("latin-1"))
        await _answer(send, 200, rendered.body, rendered.content_type)


async def _answer(send: Send, status: int, body: bytes, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class _MetricsServer(uvicorn.Server):
    """Leaves signals to the server of the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Nothing."""
        yield


@contextlib.asynccontextmanager
async def serving_metrics(
    get_page: Callable[[], MetricsPage | None], listener: socket.socket
) -> AsyncGenerator[None]:
    """Serve on a listening socket, which is the caller's to close, until the block is left."""
    config = uvicorn.Config(
        MetricsApp(get_page), ws="none", lifespan="off", access_log=False, log_config=None,
        server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = _MetricsServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="metrics")
    try:
        yield
    finally:
        server.should_exit = True
        await task
