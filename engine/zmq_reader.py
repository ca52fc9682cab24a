"""A zmq socket read from an asyncio loop, without a task or a future for each message."""

import asyncio
from collections.abc import Callable

import zmq

MAX_MESSAGES_PER_TURN = 20
"""Then other callbacks of the loop have their turn. A message holds a step's tokens, and those are
written to their clients while it is handled."""


class ZmqReader:
    """Calls `on_message(frames)` on the event loop for each message that arrives.

    zmq's descriptor is edge-triggered: it tells that something changed, once, and a send may
    consume that notice. So it is drained whenever it fires, and `poke` after each send looks
    again. (pyzmq's own asyncio sockets do the same with a future a message.)
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
        """Stop reading; the socket stays its owner's."""
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
