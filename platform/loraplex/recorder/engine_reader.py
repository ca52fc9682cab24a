"""Asks the engine what it did, from a socket that never says hello.

A client that says hello is given adapters to fetch and the calls of dead clients to settle. One
that only asks is answered all the same. One question at a time.
"""

import asyncio
import itertools
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from engine.engine_stats import EngineStats
from engine.errors import EngineUnavailable
from engine.messages import EngineMessage, GetStats, Stats
from engine.telemetry.records import Cursor, GetTelemetry, Telemetry
from engine.transport.wire import Codec, WireError

ANSWER_SECONDS = 5.0
"""An engine may be within a step: its records wait, and so may the next question."""


class EngineReader:
    """An async context manager. Methods raise `EngineUnavailable`."""

    def __init__(self, socket_path: Path, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._socket_path = socket_path
        self._answer_seconds = answer_seconds
        self._codec = Codec()
        self._call_ids = itertools.count(1)

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, b"w" + secrets.token_bytes(15))
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IMMEDIATE, 1)  # no question is kept for the next engine
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.connect(f"ipc://{self._socket_path}")
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    async def telemetry(
        self, cursor: Cursor, *, limit: int = 500, with_totals: bool = False
    ) -> Telemetry:
        """What the engine did since a cursor; see `EngineClient.telemetry`."""
        call_id = next(self._call_ids)
        answer = await self._ask(
            GetTelemetry(call_id=call_id, cursor=cursor, limit=limit, with_totals=with_totals),
            call_id,
        )
        assert isinstance(answer, Telemetry)
        return answer

    async def stats(self) -> EngineStats:
        """A snapshot of the engine."""
        call_id = next(self._call_ids)
        answer = await self._ask(GetStats(call_id), call_id)
        assert isinstance(answer, Stats)
        return answer.stats

    async def _ask(self, question: GetStats | GetTelemetry, call_id: int) -> Telemetry | Stats:
        try:
            async with asyncio.timeout(self._answer_seconds):
                await self._socket.send(self._codec.encode(question))
                while True:
                    message = self._decode(await self._socket.recv())
                    if isinstance(message, Telemetry | Stats) and message.call_id == call_id:
                        return message
        except TimeoutError:
            raise EngineUnavailable("the engine did not answer in time") from None

    def _decode(self, payload: bytes) -> EngineMessage:
        try:
            return self._codec.decode_engine(payload)
        except WireError as error:
            raise EngineUnavailable(f"the engine's answer cannot be read: {error}") from error
