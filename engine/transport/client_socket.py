"""The engine's ROUTER socket: never blocks, and notices clients that do not read."""

import os
import stat
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from engine.errors import ConfigError
from engine.transport.wire import MAX_CLIENT_MESSAGE

SEND_QUEUE_LEN = 1000
RECEIVE_QUEUE_LEN = 10_000
MAX_BACKLOG_BYTES = 64 * 2**20
"""A client for which more is kept is dropped, however recently it read."""
LINGER_MS = 2000
"""How long closing waits for the last messages to leave, such as the final outputs of a stop."""


@dataclass(slots=True)
class _Backlog:
    since: float
    payloads: deque[bytes] = field(default_factory=deque[bytes])
    num_bytes: int = 0


class ClientSocket:
    """Sends to and receives from clients by identity.

    What a client's queue does not take waits in a backlog, in order; `flush` tries again.
    """

    def __init__(self, path: Path, *, patience: float = 5.0) -> None:
        """Bind. A client that reads nothing for `patience` seconds is dropped.

        Raises `ConfigError` where the folder is open to others or binding fails.
        """
        _private_folder(path.parent)
        self._path = path
        self._patience = patience
        self._backlogs: dict[bytes, _Backlog] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.MAXMSGSIZE, MAX_CLIENT_MESSAGE)
        self._socket.set(zmq.SNDHWM, SEND_QUEUE_LEN)
        self._socket.set(zmq.RCVHWM, RECEIVE_QUEUE_LEN)
        self._socket.set(zmq.LINGER, LINGER_MS)
        try:
            self._socket.bind(f"ipc://{path}")
            path.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot bind the engine's socket at {path}: {error}") from error

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """The socket itself; only for polling."""
        return self._socket

    @property
    def has_backlog(self) -> bool:
        """Whether some client has not taken all of its messages."""
        return bool(self._backlogs)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """(client, frames) of the next message; None if there is none."""
        try:
            client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return client, frames

    def send(self, client: bytes, payload: bytes, now: float) -> bool:
        """Send a message or keep it for `flush`; False if the client is no longer connected."""
        backlog = self._backlogs.get(client)
        if backlog is None:
            taken = self._try_send(client, payload)
            if taken is not None:
                return taken
            backlog = self._backlogs[client] = _Backlog(since=now)
        backlog.payloads.append(payload)
        backlog.num_bytes += len(payload)
        return True

    def flush(self, now: float) -> list[bytes]:
        """Send kept messages; returns the clients to drop: gone, or not reading for too long."""
        lost: list[bytes] = []
        for client, backlog in list(self._backlogs.items()):
            taken = self._flush_one(client, backlog, now)
            too_slow = now - backlog.since > self._patience
            if taken is False or too_slow or backlog.num_bytes > MAX_BACKLOG_BYTES:
                lost.append(client)
            if not backlog.payloads:
                del self._backlogs[client]
        return lost

    def forget(self, clients: Iterable[bytes]) -> None:
        """Drop the kept messages of clients that are gone."""
        for client in clients:
            self._backlogs.pop(client, None)

    def close(self) -> None:
        """Let go of the socket and its path, after the last messages have left."""
        self._context.destroy()
        self._path.unlink(missing_ok=True)

    def _flush_one(self, client: bytes, backlog: _Backlog, now: float) -> bool | None:
        while backlog.payloads:
            taken = self._try_send(client, backlog.payloads[0])
            if not taken:
                return taken
            backlog.num_bytes -= len(backlog.payloads.popleft())
            backlog.since = now
        return True

    def _try_send(self, client: bytes, payload: bytes) -> bool | None:
        """True: sent; False: no such client; None: its queue is full."""
        try:
            self._socket.send_multipart((client, payload), zmq.NOBLOCK)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True


def _private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"the run directory {folder} must belong to this user with mode 0700, since whoever "
            "can reach the socket can use the engine"
        )
