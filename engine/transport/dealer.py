"""A client's socket to the engine: one DEALER with an identity of its own."""

import secrets
from contextlib import suppress

import zmq

QUEUE_LEN = 10_000
RECONNECT_MS, MAX_RECONNECT_MS = 50, 500
LAST_WORDS_MS = 1000
"""How long a closed socket may take to send what is queued, if the engine still reads."""


def open_dealer(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """Make the socket; it is not connected yet."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IDENTITY, b"c" + secrets.token_bytes(15))
    socket.set(zmq.SNDHWM, QUEUE_LEN)
    socket.set(zmq.RCVHWM, QUEUE_LEN)
    socket.set(zmq.LINGER, 0)
    # IMMEDIATE is not set, because it drops the unread last words of a dying engine. It would keep
    # requests meant for one engine from the next, but their session number does that already.
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
    return socket


def close_dealer(socket: "zmq.Socket[bytes]", last_words: bytes | None) -> None:
    """Close the socket after a last message, if there is one to say."""
    if last_words is None:
        socket.close()
        return
    with suppress(zmq.Again):
        socket.send(last_words, zmq.NOBLOCK)
    socket.close(linger=LAST_WORDS_MS)
