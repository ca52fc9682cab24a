"""A client's socket to the engine: one DEALER with an identity of its own."""

import secrets

import zmq

QUEUE_LEN = 10_000
RECONNECT_MS, MAX_RECONNECT_MS = 50, 500


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
