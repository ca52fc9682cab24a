"""Which API processes are alive: each says so in Redis, once a second, and reads who else does.

Written by the processes themselves: one that hangs falls silent, whatever its supervisor thinks.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog
from redis.asyncio import Redis

from adapter_store.cache.redis_pool import FAILURES, key_prefix, open_pool

_log = structlog.get_logger("loraplex.heartbeats")

BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""Who has said nothing for so long counts as dead, and so does who spoke so far in the future: the
clock was set back since. Clocks of one host: no skew is allowed for."""
_FORGOTTEN_SECONDS = 60.0


class ApiProcess(msgspec.Struct, frozen=True):
    """An API process. `id` is random; times are Unix seconds."""

    id: str
    pid: int
    host: str
    started_at: float


class Heartbeats:
    """Enter it to begin. Without a `redis_url` there is one process, this one.

    `service` tells services that share a Redis apart. While Redis is away those processes count as
    alive that were when it was last heard of.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        service: str = "",
        *,
        expected: int = 1,
        clock: Callable[[], float] = time.time,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._clock = clock
        self._beat_seconds = beat_seconds
        self._expected = expected
        self.me = ApiProcess(secrets.token_hex(8), os.getpid(), socket.gethostname(), clock())
        self._said = msgspec.json.encode(self.me)
        self._name = f"{key_prefix(service)}:alive"
        self._redis: Any = None
        if redis_url is not None:
            self._redis = Redis.from_pool(open_pool(redis_url, max_connections=2))
        self._alive: dict[ApiProcess, float] | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._redis is not None:
            await self._try_to_beat()
            self._task = asyncio.create_task(self._run(), name="heartbeats")
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        with contextlib.suppress(*FAILURES):
            await self._redis.zrem(self._name, self._said)  # it ends: others need not wait
        with contextlib.suppress(*FAILURES):
            await self._redis.aclose()

    @property
    def num_alive(self) -> int:
        """API processes, this one included. Before Redis was heard of: as many as were started."""
        return self._expected if self._alive is None else max(1, len(self._alive))

    def alive(self) -> list[tuple[ApiProcess, float]]:
        """Each with when it last said so, the oldest process first."""
        if self._alive is None:
            return [(self.me, self._clock())]
        return sorted(self._alive.items(), key=lambda entry: (entry[0].started_at, entry[0].id))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            await self._try_to_beat()

    async def _try_to_beat(self) -> None:
        try:
            await self.beat()
        except FAILURES as error:
            _log.debug("heartbeat_not_written", error=type(error).__name__)

    async def beat(self) -> None:
        """Say that this process is alive and read who else is, in one round trip.

        Raises one of `FAILURES` while Redis is away.
        """
        now = self._clock()
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.zadd(self._name, {self._said: now})
            pipeline.zremrangebyscore(self._name, "-inf", now - _FORGOTTEN_SECONDS)
            pipeline.zremrangebyscore(self._name, now + _FORGOTTEN_SECONDS, "+inf")
            pipeline.expire(self._name, int(_FORGOTTEN_SECONDS))
            pipeline.zrangebyscore(
                self._name, now - SILENT_SECONDS, now + SILENT_SECONDS, withscores=True
            )
            *_, found = await pipeline.execute()
        self._alive = {
            process: float(score)
            for member, score in found
            if (process := _decoded(member)) is not None
        }


def _decoded(member: bytes) -> ApiProcess | None:
    try:
        return msgspec.json.decode(member, type=ApiProcess)
    except msgspec.DecodeError:  # of another release, perhaps
        return None
