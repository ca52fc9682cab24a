"""Messages as bytes: msgpack, one codec object an endpoint."""

from typing import TypeVar

import msgspec

from engine.messages import ClientMessage, EngineMessage

MAX_CLIENT_MESSAGE = 16 * 2**20
"""Bytes that a client may send in one message; the socket drops who sends more."""


M = TypeVar("M")


class WireError(Exception):
    """Bytes that are no message. The text names the field and never quotes a prompt."""


class Codec:
    """Encodes and decodes messages; reusable buffers make it belong to one thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._client_decoder = msgspec.msgpack.Decoder(ClientMessage)
        self._engine_decoder = msgspec.msgpack.Decoder(EngineMessage)

    def encode(self, message: ClientMessage | EngineMessage) -> bytes:
        """A message as bytes."""
        return self._encoder.encode(message)

    def decode_client(self, payload: bytes) -> ClientMessage:
        """What a client sent; raises `WireError`."""
        return _decode(self._client_decoder, payload)

    def decode_engine(self, payload: bytes) -> EngineMessage:
        """What the engine sent; raises `WireError`."""
        return _decode(self._engine_decoder, payload)


def _decode(decoder: "msgspec.msgpack.Decoder[M]", payload: bytes) -> M:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(str(error)) from error
