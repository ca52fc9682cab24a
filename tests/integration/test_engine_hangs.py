"""An engine that does not answer is replaced; one that is idle, or waits for a disk, is not."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import EngineUnavailable
from engine.messages import Alive
from engine.transport.request_stream import RequestStream
from engine.transport.zmq_client import ZmqEngineClient
from loraplex.supervisor.child import Child
from tests.support.engine_server import RawClient, run_dir
from tests.support.scripted_engine import digest_of, put_fake_adapter, request

pytestmark = pytest.mark.anyio


class SupervisedEngine:
    """A scripted engine under the supervisor's own care, and a client of it."""

    def __init__(
        self, folder: Path, behaviour: str, silence_seconds: float | None, args: dict[str, Any]
    ) -> None:
        self.socket_path = folder / "engine.sock"
        self.cache_dir = folder / "cache"
        self._args = args | {
            "model_dir": str(folder),
            "socket_path": str(self.socket_path),
            "cache_dir": str(self.cache_dir),
        }
        self._path = folder / "args.json"
        command = [sys.executable, "-m", "tests.support.engine_server", str(self._path), behaviour]
        self.child = Child("engine", command, self._payload, silence_seconds=silence_seconds)
        self.client = ZmqEngineClient(
            self.socket_path, self._fetch, beat_seconds=0.1, doubt_after=1.0
        )

    def _payload(self, generation: int) -> bytes:
        self._path.write_bytes(msgspec.json.encode(self._args | {"generation": generation}))
        return b""

    async def _fetch(self, digest: str) -> None:
        put_fake_adapter(self.cache_dir, digest)


@contextlib.asynccontextmanager
async def supervised(
    behaviour: str, *, silence_seconds: float | None = None, **args: Any
) -> AsyncIterator[SupervisedEngine]:
    with run_dir() as folder:
        engine = SupervisedEngine(folder, behaviour, silence_seconds, args)
        running = asyncio.create_task(engine.child.run())
        await engine.client.start()
        try:
            await engine.client.wait_ready(60)
            yield engine
        finally:
            await engine.client.close()
            engine.child.kill()
            await running


async def read(stream: RequestStream) -> list[int]:
    token_ids: list[int] = []
    async for output in stream:
        token_ids += [token for delta in output.deltas for token in delta.token_ids]
    return token_ids


async def test_a_hung_engine_is_not_ready_fails_what_is_pending_and_is_replaced() -> None:
    async with supervised("hang_once", hang_seconds=4.0) as engine:
        client = engine.client
        running = await client.generate(request(1, [5], max_tokens=20))
        async with asyncio.timeout(60):
            while client.is_ready:  # noqa: ASYNC110 (nothing tells of doubt)
                await asyncio.sleep(0.02)
        pid = engine.child.pid
        stats = asyncio.create_task(client.stats())
        for pending in (read(running), stats):
            with pytest.raises(EngineUnavailable):
                await pending
        await client.wait_ready(60)
        assert (engine.child.generation, engine.child.pid != pid) == (2, True)
        assert client.is_ready
        assert await read(await client.generate(request(2, [5], max_tokens=20))) == [7] * 20


async def test_an_engine_that_is_stopped_cannot_end_itself_and_is_replaced() -> None:
    async with supervised("endless", silence_seconds=4.0) as engine:
        client = engine.client
        running = await client.generate(request(1, [5], max_tokens=50_000))
        pid = engine.child.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailable):
            await read(running)
        await client.wait_ready(60)
        assert (engine.child.generation, engine.child.pid != pid) == (2, True)
        assert await read(await client.generate(request(2, [5], max_tokens=20))) == [7] * 20


async def test_an_idle_engine_is_not_taken_for_a_hung_one() -> None:
    async with supervised("echo", silence_seconds=3.0, hang_seconds=2.5) as engine:
        raw = RawClient(engine.socket_path)
        await asyncio.to_thread(raw.join)
        for _ in range(8):  # two beats a second
            await asyncio.to_thread(raw.receive, Alive)
        raw.close()
        assert engine.child.generation == 1
        assert await read(await engine.client.generate(request(1, [5, 6]))) == [5, 6, 0]


async def test_a_load_that_takes_longer_than_a_step_may_is_waited_for() -> None:
    async with supervised("slow_load", hang_seconds=2.5) as engine:
        client = engine.client
        cold = await client.generate(request(1, [5], adapter=digest_of(1), max_tokens=3))
        waiting = asyncio.create_task(read(cold))
        num_served = 0
        while not waiting.done():
            number = client.next_request_id() + 10
            assert (
                await read(await client.generate(request(number, [6], max_tokens=50))) == [7] * 50
            )
            num_served += 1
        assert await waiting == [7] * 3
        assert num_served > 1, "the base is served all the while"
        assert engine.child.generation == 1
