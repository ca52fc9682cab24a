"""Sending a part of a reply's body without awaiting, past uvicorn's own `send`."""

from collections.abc import Callable

from litestar.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def body_writer(send: Send) -> Callable[[bytes], bool]:
    """Return a function that does at once what awaiting `send` does with a part of a chunked body.

    It says False, and does nothing, where that is not possible: the client is gone or slower than
    we are, or `send` is not uvicorn's own.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return lambda body: False

    def write(body: bytes) -> bool:
        if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    return write
