"""A zmq socket read from an asyncio loop, without a task or a future for each message."""

import asyncio
from collections.abc import Callable

import zmq

MAX_MESSAGES_PER_TURN = 20
"""Messages handled before other callbacks of the loop have their turn. Handling one takes a while:
it holds the tokens of a step, which are written to their clients meanwhile."""


class ZmqReader:
    """Calls `on_message(frames)` on the event loop for each message that arrives.

    zmq's file descriptor is edge-triggered: it fires once when something changes, and a send may
    consume that. So the socket is drained whenever it fires, and `poke`, called after each send,
    looks again. (pyzmq's own asyncio sockets do the same, with a future for every message.)
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[bytes]], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_message = on_message
        self._is_poked = False
        self._is_closed = False
        self._fd = int(socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._read_some)
        self.poke()

    def poke(self) -> None:
        """Look for messages soon; call it after each send."""
        if not self._is_poked and not self._is_closed:
            self._is_poked = True
            self._loop.call_soon(self._poked)

    def read_all(self) -> None:
        """Take everything that has arrived, now."""
        while self._read_one():
            pass

    def close(self) -> None:
        """Stop reading; the owner still has to close the socket."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)

    def _poked(self) -> None:
        self._is_poked = False
        self._read_some()

    def _read_some(self) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            if not self._read_one():
                return
        self.poke()

    def _read_one(self) -> bool:
        if self._is_closed:
            return False
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._on_message(frames)
        return True
