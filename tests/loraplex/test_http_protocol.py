"""What a connection may cost before there is a key: heads, silence, readers who stop reading."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from loraplex.http_protocol import MAX_PIPELINED, bounded_http
from loraplex.settings import ConnectionLimits

pytestmark = pytest.mark.anyio

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]

CHUNK = b"x" * 4096
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Echo:
    """Answers with the body it got; `/headers` with the names of the headers, `/endless` streams
    until its client is gone."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/endless":
            await self._stream(receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/headers":
            body = b",".join(name for name, _ in scope["headers"])
        length = str(len(body)).encode()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
        )
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, receive: Any, send: Any) -> None:
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            self.num_chunks += 1
            await asyncio.sleep(0)
        self.gone.set()


@contextlib.asynccontextmanager
async def served(app: Echo, **limits: Any) -> AsyncIterator[Connect]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    config = uvicorn.Config(
        app, http=bounded_http(ConnectionLimits(**limits)), ws="none", lifespan="off",
        access_log=False, log_config=None, timeout_graceful_shutdown=2,
    )  # fmt: skip
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([listener]))
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> Connection:
        reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=2048)
        writers.append(writer)
        return reader, writer

    try:
        while not server.started:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            yield connect
    finally:
        for writer in writers:
            writer.transport.abort()
        server.should_exit = True
        await task
        listener.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body of the next reply."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nx: " + b"a" * 2000,
        b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 400,
        b"GET /" + b"a" * 600 + b" HTTP/1.1\r\nx: " + b"a" * 600,
    ],
    ids=["one header", "many headers", "path and header"],
)
@pytest.mark.parametrize("rest", [b"", b"\r\n\r\n" + GET], ids=["while it comes", "in one piece"])
async def test_a_head_beyond_the_limit_is_refused(head: bytes, rest: bytes):
    async with served(Echo(), max_head_bytes=1000) as connect:
        reader, writer = await connect()
        writer.write(GET)
        assert (await answer(reader))[0] == 200
        writer.write(head + rest)
        assert (await answer(reader))[0] == 431
        assert await reader.read() == b""


async def test_a_body_may_be_larger_than_a_head_and_so_may_a_connection():
    body = b"b" * 50_000
    request = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with served(Echo(), max_head_bytes=1000) as connect:
        reader, writer = await connect()
        for cut in (0, 60, 20_000, 48_000, len(request)):
            writer.write(request[:cut])
            await asyncio.sleep(0.02)  # the rest, or none of it, is another read
            writer.write(request[cut:])
            assert await answer(reader) == (200, body)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP", b"GET / HTTP/1.1\r\nx: a\r\n"])
async def test_a_head_that_does_not_come_in_time_ends_the_connection(sent: bytes):
    async with served(Echo(), head_seconds=0.2) as connect:
        reader, writer = await connect()
        writer.write(sent)
        assert await reader.read() == b""


async def test_a_head_that_trickles_gets_no_more_time():
    async with served(Echo(), head_seconds=0.3) as connect:
        reader, writer = await connect()
        writer.write(GET)
        assert (await answer(reader))[0] == 200
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        closed = asyncio.create_task(reader.read())
        with contextlib.suppress(ConnectionError):
            while not closed.done():
                writer.write(b"a")
                await asyncio.sleep(0.02)
        with contextlib.suppress(ConnectionError):
            assert await closed == b""


async def test_a_slow_body_and_a_pause_between_requests_are_no_slow_heads():
    async with served(Echo(), head_seconds=0.1) as connect:
        reader, writer = await connect()
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\ncontent-length: 4\r\n\r\n")
            for byte in b"slow":
                await asyncio.sleep(0.08)
                writer.write(bytes([byte]))
            assert await answer(reader) == (200, b"slow")
            await asyncio.sleep(0.2)


async def test_a_reader_who_stops_reading_is_disconnected():
    app = Echo()
    async with served(app, stalled_write_seconds=0.3) as connect:
        _, writer = await connect()
        writer.write(b"GET /endless HTTP/1.1\r\n\r\n")
        await app.gone.wait()


async def test_a_reader_who_reads_slowly_is_not():
    app = Echo()
    async with served(app, stalled_write_seconds=1.0) as connect:
        reader, writer = await connect()
        writer.write(b"GET /endless HTTP/1.1\r\n\r\n")
        for _ in range(30):
            await asyncio.sleep(0.05)
            await reader.readexactly(100_000)
        assert app.num_chunks * len(CHUNK) > 3_000_000
        assert not app.gone.is_set()


async def test_requests_that_wait_on_a_connection_are_bounded():
    async with served(Echo()) as connect:
        reader, writer = await connect()
        writer.write(GET * (MAX_PIPELINED + 1))  # one is answered, the others wait
        for _ in range(MAX_PIPELINED + 1):
            assert (await answer(reader))[0] == 200
        writer.write(b"GET /endless HTTP/1.1\r\n\r\n" + GET * MAX_PIPELINED)
        await reader.readexactly(100_000)
        writer.write(GET)
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass


async def test_who_goes_away_ends_the_reply_under_way_whatever_waits_behind_it():
    app = Echo()
    async with served(app) as connect:
        reader, writer = await connect()
        writer.write(GET + b"GET /endless HTTP/1.1\r\n\r\n" + GET + GET)
        assert (await answer(reader))[0] == 200
        await reader.readexactly(100_000)
        writer.transport.abort()
        await app.gone.wait()


@pytest.mark.parametrize("field", [b"Host: x", b"Authorization: Bearer a"])
async def test_a_field_that_says_who_calls_comes_once(field: bytes):
    head = b"GET / HTTP/1.1\r\n%b\r\n" % field
    async with served(Echo()) as connect:
        reader, writer = await connect()
        for _ in range(2):  # of a request each
            writer.write(head + b"\r\n")
            assert (await answer(reader))[0] == 200
        writer.write(head + field.upper() + b"\r\n\r\n")
        assert (await answer(reader))[0] == 400
        assert await reader.read() == b""


async def test_a_client_of_http_1_0_is_sent_no_interim_reply():
    async with served(Echo()) as connect:
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\nbody")
        assert await answer(reader) == (200, b"body")


@pytest.mark.parametrize("offer", [b"Upgrade: h2c", b"UPGRADE : h2c", b"upgrade: websocket"])
async def test_the_body_of_a_request_that_offers_another_protocol_is_read(offer: bytes):
    request = (
        b"POST / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n" + offer.replace(b" :", b":")
        + b"\r\nHTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\nContent-Length: 4\r\n\r\nbody"
    )  # fmt: skip
    async with served(Echo()) as connect:
        reader, writer = await connect()
        writer.write(request)
        assert await answer(reader) == (200, b"body")
        writer.write(GET)
        assert (await answer(reader))[0] == 200
