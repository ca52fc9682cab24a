"""The service's client when engines come and go: generations, sessions, silence, late answers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq

from engine.engine_info import EngineInfo
from engine.errors import EngineUnavailable
from engine.messages import (
    Abort,
    Accepted,
    Alive,
    ChoiceDelta,
    ClientMessage,
    EngineMessage,
    Generate,
    Heartbeat,
    Hello,
    Outputs,
    RequestOutput,
    SetResidency,
    Welcome,
)
from engine.transport.wire import Codec
from engine.transport.zmq_client import ZmqEngineClient
from tests.support.engine_server import run_dir
from tests.support.scripted_engine import (
    digest_of,
    request,
)
from tests.support.waiting import SECONDS, eventually
from tests.support.zmq_clients import client_of

pytestmark = pytest.mark.anyio
A, B = digest_of(1), digest_of(2)
INFO = EngineInfo(
    model="fake", fingerprint="0" * 64, vocab_size=10, eos_token_ids=[0], max_model_len=64,
    block_size=16, num_kv_blocks=4, max_num_seqs=4, max_num_batched_tokens=16, max_loras=1,
    max_lora_rank=8, dtype="float32", device="cpu",
)  # fmt: skip


class FakeEngine:
    """A bare ROUTER that says what it is told to, on the test's own loop."""

    def __init__(self, socket_path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{socket_path}")
        self._codec = Codec()
        self.client = b""

    async def receive(self, kind: type[ClientMessage]) -> ClientMessage:
        """The next message of a kind; others are skipped."""
        async with asyncio.timeout(SECONDS):
            while True:
                while self._socket.poll(0):
                    self.client, payload = self._socket.recv_multipart()
                    message = self._codec.decode_client(payload)
                    if isinstance(message, kind):
                        return message
                await asyncio.sleep(0.002)

    def send(self, *messages: EngineMessage) -> None:
        for message in messages:
            self._socket.send_multipart((self.client, self._codec.encode(message)))

    def send_bytes(self, payload: bytes) -> None:
        self._socket.send_multipart((self.client, payload))

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def fake_engine() -> Iterator[tuple[FakeEngine, Path]]:
    with run_dir() as folder:
        engine = FakeEngine(folder / "s")
        try:
            yield engine, folder / "s"
        finally:
            engine.close()


async def accepted(engine: FakeEngine, client: ZmqEngineClient) -> AsyncIterator[RequestOutput]:
    """A stream of request 1, queued at a fake engine of generation 1, session 10."""
    await engine.receive(Hello)
    engine.send(Welcome(1, INFO, 10))
    await client.wait_ready(SECONDS)
    generating = asyncio.ensure_future(client.generate(request(1, [5])))
    message = await engine.receive(Generate)
    assert isinstance(message, Generate) and message.session == 10
    engine.send(Accepted(1, 1))
    return await generating


async def test_a_new_generation_fails_the_old_requests_and_drops_late_tokens() -> None:
    with fake_engine() as (engine, path):
        async with client_of(path, ready=False) as client:
            stream = await accepted(engine, client)
            engine.send(Alive(2))
            with pytest.raises(EngineUnavailable, match="restarted"):
                await anext(stream)
            assert not client.is_ready
            await engine.receive(Hello)
            engine.send(Welcome(2, INFO, 11))
            await client.wait_ready(SECONDS)
            generating = asyncio.ensure_future(client.generate(request(2, [5])))
            message = await engine.receive(Generate)
            assert isinstance(message, Generate) and message.session == 11
            engine.send(Accepted(2, 2))
            fresh = await generating
            engine.send(Outputs(1, [RequestOutput(2, [ChoiceDelta(0, [9])])]))
            engine.send(Outputs(2, [RequestOutput(1, [ChoiceDelta(0, [9])])]))
            engine.send(Outputs(2, [RequestOutput(2, [ChoiceDelta(0, [1])], finished=True)]))
            tokens = [output.deltas[0].token_ids async for output in fresh]
            assert tokens == [[1]]


async def test_the_welcome_of_a_new_engine_fails_the_old_ones_requests() -> None:
    with fake_engine() as (engine, path):
        async with client_of(path, ready=False) as client:
            stream = await accepted(engine, client)
            engine.send(Welcome(2, INFO, 20))
            with pytest.raises(EngineUnavailable):
                await anext(stream)
            assert client.is_ready
            generating = asyncio.ensure_future(client.generate(request(2, [5])))
            await engine.receive(Generate)
            engine.send(Accepted(2, 2), Outputs(2, [RequestOutput(2, [], finished=True)]))
            assert [output.finished async for output in await generating] == [True]


async def test_an_engine_that_dropped_this_client_is_noticed_by_its_new_session() -> None:
    with fake_engine() as (engine, path):
        async with client_of(path, ready=False) as client:
            stream = await accepted(engine, client)
            engine.send(Welcome(1, INFO, 10))  # an answer to a second hello: nothing is lost
            engine.send(Outputs(1, [RequestOutput(1, [ChoiceDelta(0, [3])])]))
            assert (await anext(stream)).deltas[0].token_ids == [3]
            engine.send(Welcome(1, INFO, 11))
            with pytest.raises(EngineUnavailable, match="lost this client"):
                await anext(stream)
            assert client.is_ready


async def test_a_silent_engine_counts_as_dead_and_its_requests_are_aborted() -> None:
    with fake_engine() as (engine, path):
        async with client_of(path, ready=False, dead_after=1.0) as client:
            began = time.monotonic()
            stream = await accepted(engine, client)
            with pytest.raises(EngineUnavailable, match="silent"):
                await anext(stream)
            assert time.monotonic() - began > 1.0
            assert not client.is_ready
            await engine.receive(Hello)
            engine.send(Welcome(1, INFO, 10))  # it was only slow
            await client.wait_ready(SECONDS)
            message = await engine.receive(Abort)
            assert isinstance(message, Abort) and message.request_id == 1


async def test_a_long_step_makes_the_engine_not_ready_but_loses_nothing() -> None:
    with fake_engine() as (engine, path):
        async with client_of(path, ready=False, doubt_after=0.5) as client:
            stream = await accepted(engine, client)
            async with asyncio.timeout(SECONDS):
                while client.is_ready:
                    await engine.receive(Heartbeat)
            engine.send(Outputs(1, [RequestOutput(1, [ChoiceDelta(0, [7])], finished=True)]))
            assert (await anext(stream)).deltas[0].token_ids == [7]
            assert client.is_ready


async def test_every_new_engine_is_reported_with_its_disk_and_told_what_to_keep() -> None:
    with fake_engine() as (engine, path):
        async with client_of(path, ready=False) as client:
            joined: list[list[str]] = []
            client.on_join(lambda recent: joined.append(list(recent)))
            client.set_residency([A], [])  # nobody is there: the next welcome asks again
            await engine.receive(Hello)
            engine.send(Welcome(1, INFO, 10, warming=True, recent=[B, A]))
            await client.wait_ready(SECONDS)
            assert joined == [[B, A]] and client.is_ready and client.is_warming
            client.set_residency([A], [B], [B])
            assert await engine.receive(SetResidency) == SetResidency([A], [B], [B])
            engine.send(Alive(1))
            await eventually(lambda: not client.is_warming)
            engine.send(Welcome(1, INFO, 10), Welcome(2, INFO, 11, recent=[A]))
            await eventually(lambda: len(joined) > 1)
            assert joined == [[B, A], [A]]
            client.on_join(lambda recent: joined.append(["late", *recent]))
            assert joined[-1] == ["late", A]


async def test_stats_do_not_wait_for_ever() -> None:
    with fake_engine() as (engine, path):
        client = ZmqEngineClient(path, _no_fetch, beat_seconds=0.1, stats_timeout=0.2)
        await client.start()
        try:
            await engine.receive(Hello)
            engine.send(Welcome(1, INFO, 10))
            await client.wait_ready(SECONDS)
            with pytest.raises(EngineUnavailable, match="in time"):
                await client.stats()
        finally:
            await client.close()


async def test_it_beats_while_idle_and_survives_bytes_that_are_no_message() -> None:
    with fake_engine() as (engine, path):
        async with client_of(path, ready=False) as client:
            stream = await accepted(engine, client)
            engine.send_bytes(b"\xc1garbage")
            for _ in range(3):
                await engine.receive(Heartbeat)
            engine.send(Outputs(1, [RequestOutput(1, [], finished=True)]))
            assert [output.finished async for output in stream] == [True]


async def _no_fetch(digest: str) -> None:
    raise FileNotFoundError(digest)
