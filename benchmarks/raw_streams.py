"""Streams read as bytes off non-blocking sockets: a client that costs as little as one can."""

import re
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

_END = b"0\r\n\r\n"
_RECEIVE_BYTES = 1 << 18


@dataclass(frozen=True)
class Call:
    """A streamed call, ready to send."""

    path: str
    body: dict[str, Any]

    def as_bytes(self, key: str) -> bytes:
        body = msgspec.json.encode(
            {**self.body, "stream": True, "stream_options": {"include_usage": True}}
        )
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def completion(model: str, max_tokens: int) -> Call:
    prompt = list(range(100, 132))
    return Call(
        "/v1/completions",
        {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0},
    )


def chat(model: str, max_tokens: int) -> Call:
    messages = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "Where is my parcel?"},
    ]
    return Call(
        "/v1/chat/completions",
        {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0},
    )


@dataclass
class Stream:
    """One connection, for one call after another; times are `time.perf_counter`'s."""

    connection: socket.socket
    sent_at: float = 0.0
    first_at: float = 0.0
    """The first event with text."""
    last_at: float = 0.0
    num_events: int = 0
    gaps: list[float] = field(default_factory=list[float])
    """Between one arrival of bytes and the next."""
    tail: bytes = b""

    @property
    def num_tokens(self) -> int:
        """As the usage event says."""
        found = re.search(rb'"completion_tokens":(\d+)', self.tail)
        if found is None:
            raise SystemExit(f"a stream ended with {self.tail[-300:]!r}")
        return int(found[1])

    def send(self, request: bytes) -> None:
        self.first_at, self.num_events, self.tail = 0.0, 0, b""
        self.gaps.clear()
        self.sent_at = time.perf_counter()
        self.connection.sendall(request)

    def receive(self) -> bool:
        """Take what is there; True at the end of the reply."""
        data = self.connection.recv(_RECEIVE_BYTES)
        now = time.perf_counter()
        if not data:
            raise SystemExit(f"the service closed a stream after {self.tail[-300:]!r}")
        if self.num_events:
            self.gaps.append(now - self.last_at)
        elif self.tail == b"" and not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the service refused a call: {data!r}")
        self.last_at = now
        # An event may be cut in two between its newlines.
        self.num_events += (self.tail[-1:] + data).count(b"\n\n")
        if not self.first_at and _has_text(data):
            self.first_at = now
        self.tail = (self.tail + data)[-2048:]
        return data.endswith(_END)


def _has_text(data: bytes) -> bool:
    return b'"text":"' in data or b'"content":"' in data.replace(b'"content":""', b"")


def connect(port: int, num: int) -> list[Stream]:
    streams: list[Stream] = []
    for _ in range(num):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        streams.append(Stream(connection))
    return streams


def read_all(streams: Sequence[Stream], on_end: Callable[[Stream], bool] = lambda _: False) -> None:
    """Read until all replies have ended; `on_end` may send the next call and say True."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.connection, selectors.EVENT_READ, stream)
        num_open = len(streams)
        while num_open:
            for key, _ in selector.select():
                if key.data.receive() and not on_end(key.data):
                    selector.unregister(key.fileobj)
                    num_open -= 1
