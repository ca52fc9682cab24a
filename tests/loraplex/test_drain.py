"""A request that is still running when the drain limit is over gets an answer."""

import asyncio
import json
from typing import Any

import pytest

from loraplex.drain import answering_when_cut
from tests.support.service import running_service

pytestmark = pytest.mark.anyio


def http_scope(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "headers": list(headers), "client": None, "server": ("x", 80),
        "state": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "key"), [("/v1/completions", "acme:inference"), ("/v1/adapters", "acme:tenant")]
)
async def test_a_body_that_has_not_come_is_503_in_the_shape_of_its_path(tmp_path, path, key):
    async with running_service(tmp_path) as service:
        is_waiting = asyncio.Event()
        sent: list[Any] = []

        async def receive() -> Any:
            is_waiting.set()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = http_scope(
            path, (b"authorization", f"Bearer {service.keys[key]}".encode()),
            (b"content-type", b"multipart/form-data; boundary=x"), (b"content-length", b"99"),
        )  # fmt: skip
        app: Any = answering_when_cut(service.app)
        request = asyncio.create_task(app(scope, receive, send))
        await asyncio.wait_for(is_waiting.wait(), 10)
        request.cancel()
        await request
    start, end = sent
    assert start["status"] == 503
    assert json.loads(end["body"])["error"]["code"] == "shutting_down"
    assert list((tmp_path / "uploads").iterdir()) == []


async def test_a_reply_that_has_begun_just_ends():
    begun = asyncio.Event()
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message["type"])

    wrapped: Any = answering_when_cut(app)
    request = asyncio.create_task(wrapped(http_scope("/v1/x"), None, send))
    await begun.wait()
    request.cancel()
    await request
    assert sent == ["http.response.start"]
