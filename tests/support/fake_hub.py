"""A hub on loopback that says what a test tells it to, true or not."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

COMMIT = "c" * 40


@dataclass
class Reply:
    """`length` is announced instead of the body's own; with `stalls` the body never ends."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    length: int | None = None
    has_length: bool = True
    stalls: bool = False


@dataclass
class Request:
    path: str
    headers: dict[str, str]


@dataclass
class FakeHub:
    """Replies by path; what has none is a 404."""

    port: int = 0
    replies: dict[str, Reply] = field(default_factory=dict[str, Reply])
    requests: list[Request] = field(default_factory=list[Request])

    def origin(self, host: str = "hub.test", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}"

    def publish(
        self, repository: str, config: bytes, weights: bytes, revision: str = "main"
    ) -> None:
        """A repository as the real hub shows it: with its commit, under which it is found too."""
        for name, body in (("adapter_config.json", config), ("adapter_model.safetensors", weights)):
            for at in (revision, COMMIT):
                self.replies[f"/{repository}/resolve/{at}/{name}"] = Reply(
                    body, headers={"x-repo-commit": COMMIT}
                )

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
            path = head[0].split(" ")[1]
            self.requests.append(Request(path, headers))
            reply = self.replies.get(path, Reply(status=404))
            lines = [f"HTTP/1.1 {reply.status} X", "connection: close"]
            if reply.has_length:
                length = len(reply.body) if reply.length is None else reply.length
                lines.append(f"content-length: {length}")
            lines += [f"{name}: {value}" for name, value in reply.headers.items()]
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + reply.body)
            await writer.drain()
            if reply.stalls:
                await reader.read()  # until the other side has had enough
        writer.close()


@contextlib.asynccontextmanager
async def fake_hub(tls: ssl.SSLContext | None = None) -> AsyncGenerator[FakeHub]:
    hub = FakeHub()
    server = await asyncio.start_server(hub.answer, "127.0.0.1", 0, ssl=tls)
    hub.port = server.sockets[0].getsockname()[1]
    try:
        yield hub
    finally:
        server.close()
        await server.wait_closed()


@dataclass
class FakeResolver:
    """Names and their addresses; an answer that is a list of lists is given one by one."""

    names: dict[str, Sequence[str]]
    asked: list[str] = field(default_factory=list[str])

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.names:
            raise OSError("no such name")
        return self.names[host]
