"""The sockets that a service listens on, bound before anything starts; or why they cannot be."""

import contextlib
import errno
import socket
from collections.abc import Generator

from loraplex.supervisor.serve_options import ServeError


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen on a TCP address; port 0 takes a free one. Raises `OSError`.

    Child processes may inherit the socket.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    listener.set_inheritable(True)
    return listener


def open_listener(host: str, port: int, option: str = "--port") -> socket.socket:
    """Listen on a TCP address; raises `ServeError`, which names the option to change."""
    try:
        return listen(host, port)
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                fix = f"stop what uses the port, or choose another with {option}"
            case errno.EACCES:
                fix = f"choose a port above 1023 with {option}"
            case _:
                fix = "choose an address of this machine with --host, as 127.0.0.1 or 0.0.0.0"
        # The library's own text repeats the address.
        reason = (error.strerror or str(error)).partition(" (while ")[0]
        raise ServeError(f"cannot listen on {host}:{port}: {reason}; {fix}") from None


@contextlib.contextmanager
def metrics_listeners(first_port: int | None, workers: int) -> Generator[tuple[socket.socket, ...]]:
    """One an API process, at consecutive ports of the loopback; none where `first_port` is None.

    Port 0 takes a free one for each. Raises `ServeError`.
    """
    ports: list[int] = []
    if first_port is not None:
        ports = [first_port and first_port + number for number in range(workers)]
    with contextlib.ExitStack() as stack:
        yield tuple(
            stack.enter_context(open_listener("127.0.0.1", port, "--metrics-port"))
            for port in ports
        )
