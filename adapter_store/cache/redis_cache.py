"""A `SharedCache` in Redis, or in what speaks its protocol.

A topic has a stamp, a counter that each change raises. A value is stored with the stamp that stood
before it was read from the database, and counts only while the topic's stamp is the same: so what
was read before a change is never found after it. Stamps outlive all values that carry them.

One listener per process watches the connection. Without one the cache is degraded, and no request
tries Redis. Once it is back, what processes keep in memory is doubted: they have missed events.
"""

import asyncio
import contextlib
import secrets
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from adapter_store.cache.redis_pool import CALL_SECONDS, FAILURES, key_prefix, open_pool
from adapter_store.cache.shared import Forget, Found

_log = structlog.get_logger("adapter_store.cache")

_POLL_SECONDS = 1.0
"""Between two signs of life that the listener asks for."""
_MAX_CONNECTIONS = 32
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0
_STAMP_SECONDS = 60
"""A topic without changes loses its stamp. Nothing that is stored is as old as that."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    stamp: int
    value: msgspec.Raw


class _Event(msgspec.Struct, frozen=True, array_like=True):
    origin: str
    topic: str


class RedisCache:
    """Enter it to connect; it goes on without Redis, and comes back to it by itself.

    `service` tells services that share a Redis apart: it should name the registry's database.
    """

    def __init__(self, url: str, service: str, *, call_seconds: float = CALL_SECONDS) -> None:
        """Raises `ValueError` for a URL that is none of redis://, rediss:// or unix://."""
        pool = open_pool(url, max_connections=_MAX_CONNECTIONS, call_seconds=call_seconds)
        self._redis: Any = Redis.from_pool(pool)
        self._call_seconds = call_seconds
        self._prefix = key_prefix(service)
        self._channel = f"{self._prefix}:changes"
        self._origin = secrets.token_hex(8)
        self._forget: list[Forget] = []
        self._is_connected = False
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        started = asyncio.Event()
        self._listener = asyncio.create_task(self._listen(started))
        await started.wait()  # for the first attempt, however it ends
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listener
        with contextlib.suppress(*FAILURES):
            await self._redis.aclose()

    @property
    def is_degraded(self) -> bool:
        """See `SharedCache.is_degraded`."""
        return not self._is_connected

    async def read(self, topic: str, key: str) -> Found:
        """See `SharedCache.read`. One round trip."""
        if not self._is_connected:
            return Found()
        name = self._value_name(topic, key)
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.get(self._stamp_name(topic))
                pipeline.get(name)
                pipeline.pttl(name)
                stamp_text, entry_bytes, life_ms = await pipeline.execute()
            return _found(stamp_text, entry_bytes, life_ms)
        except FAILURES as error:
            self._lost(error)
            return Found()

    async def write(
        self, topic: str, key: str, value: bytes, stamp: int, life_seconds: float
    ) -> None:
        """See `SharedCache.write`. `value` is JSON."""
        life_ms = int(life_seconds * 1000)
        if not self._is_connected or life_ms <= 0:
            return
        entry = msgspec.json.encode(_Entry(stamp, msgspec.Raw(value)))
        try:
            await self._redis.set(self._value_name(topic, key), entry, px=life_ms)
        except FAILURES as error:
            self._lost(error)

    async def invalidate(self, topic: str) -> None:
        """See `SharedCache.invalidate`. One round trip."""
        if not self._is_connected:
            return
        name = self._stamp_name(topic)
        event = msgspec.json.encode(_Event(self._origin, topic))
        try:
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.incr(name)
                pipeline.expire(name, _STAMP_SECONDS)
                pipeline.publish(self._channel, event)
                await pipeline.execute()
        except FAILURES as error:
            self._lost(error)

    def subscribe(self, forget: Forget) -> None:
        """See `SharedCache.subscribe`."""
        self._forget.append(forget)

    async def _listen(self, started: asyncio.Event) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    await self._follow(pubsub, started)
            except FAILURES as error:
                pause = _FIRST_PAUSE_SECONDS if self._is_connected else pause
                if not started.is_set():
                    _log.warning("shared_cache_unreachable", error=type(error).__name__)
                self._lost(error)
            started.set()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _follow(self, pubsub: PubSub, started: asyncio.Event) -> None:
        """Take events until the connection is lost, or until a caller found that it is."""
        await pubsub.subscribe(self._channel)
        if await pubsub.get_message(timeout=self._call_seconds) is None:  # the subscription's own
            raise TimeoutError
        await self._redis.ping()
        self._tell(None)  # after the subscription: from now on no event is missed
        self._is_connected = True
        _log.info("shared_cache_connected")
        started.set()
        while self._is_connected:
            message = await pubsub.get_message(
                ignore_subscribe_messages=True, timeout=_POLL_SECONDS
            )
            if message is None:
                await pubsub.ping()
                await self._redis.ping()
            elif message["type"] == "message":
                self._take(message["data"])

    def _take(self, data: Any) -> None:
        try:
            event = msgspec.json.decode(data, type=_Event)
        except msgspec.DecodeError:  # of another release, perhaps
            self._tell(None)
            return
        if event.origin != self._origin:
            self._tell(event.topic)

    def _tell(self, topic: str | None) -> None:
        for forget in self._forget:
            forget(topic)

    def _lost(self, error: BaseException) -> None:
        if self._is_connected:
            self._is_connected = False
            _log.warning("shared_cache_lost", error=type(error).__name__)

    def _value_name(self, topic: str, key: str) -> str:
        return f"{self._prefix}:value:{topic}:{key}"

    def _stamp_name(self, topic: str) -> str:
        return f"{self._prefix}:stamp:{topic}"


def _found(stamp_text: bytes | None, entry_bytes: bytes | None, life_ms: int) -> Found:
    stamp = int(stamp_text or 0)
    entry = _decoded(entry_bytes)
    if entry is None or entry.stamp != stamp or life_ms <= 0:
        return Found(stamp=stamp)
    return Found(bytes(entry.value), life_ms / 1000, stamp)


def _decoded(entry: bytes | None) -> _Entry | None:
    if entry is None:
        return None
    try:
        return msgspec.json.decode(entry, type=_Entry)
    except msgspec.DecodeError:
        return None
