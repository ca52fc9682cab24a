"""An OpenAI-compatible server of a few lines, in a thread: it streams what a test tells it to."""

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Reply = Callable[[Body], "int | Iterable[bytes]"]
"""From a request to a status, or to pieces of an event stream, each written on its own."""


@dataclass
class SseServer:
    url: str
    requests: list[tuple[str, str | None, Body]] = field(default_factory=list)
    """Path, authorization and body, in the order of arrival."""


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def tokens(body: Body, **last: Any) -> Iterator[bytes]:
    """Exactly as many tokens as are asked for, and the usage."""
    count = body["max_tokens"]
    is_chat = "messages" in body
    for number in range(count):
        text = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
        end = "length" if number + 1 == count else None
        yield event(choices=[{"index": 0, "finish_reason": end, **text}])
    yield event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": count}, **last)
    yield b"data: [DONE]\n\n"


@contextlib.contextmanager
def sse_server(
    reply: Reply = tokens, *, unknown: Collection[str] = (), refused: int | None = None
) -> Iterator[SseServer]:
    """`unknown`: models that it has not; `refused`: the status with which it lists none."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            if refused is not None:
                self._json(refused, {"error": {"code": "no", "message": "No."}})
            elif self.path.rpartition("/models/")[2] in unknown:
                self._json(404, {"error": {"code": "model_not_found", "message": "Not here."}})
            else:
                self._json(200, {"data": [{"id": "the-base"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found.requests.append((self.path, self.headers["authorization"], body))
            answer = reply(body)
            if isinstance(answer, int):
                self._json(answer, {"error": {"code": "queue_full", "message": "full"}})
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for piece in answer:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")

        def _json(self, status: int, document: Any) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = SseServer(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
