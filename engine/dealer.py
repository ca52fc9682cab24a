"""A client's socket to the engine: one DEALER with an identity of its own."""

import secrets
from contextlib import suppress

import zmq

QUEUE_LEN = 10_000
RECONNECT_MS, MAX_RECONNECT_MS = 50, 500
LAST_WORDS_MS = 100
"""For a closed socket to send what is queued, if there is still somebody to take it."""


def open_dealer(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """Make the socket; it is not connected yet."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IDENTITY, b"c" + secrets.token_bytes(15))
    socket.set(zmq.SNDHWM, QUEUE_LEN)
    socket.set(zmq.RCVHWM, QUEUE_LEN)
    socket.set(zmq.LINGER, 0)
    # Not IMMEDIATE: it drops what a dying engine said last and was not read yet. What it would
    # keep from the next engine, requests of the one before, their session keeps from it.
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
