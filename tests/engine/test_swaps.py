"""Versions that come and go by the dozen: streams keep theirs, nothing is left of the others."""

from collections.abc import Callable
from typing import Any

import psutil
import pytest

from engine.messages import RequestOutput
from engine.transport.request_stream import RequestStream
from tests.support.scripted_engine import ScriptedEngine, digest_of, request, scripted_engine

pytestmark = pytest.mark.anyio

NUM_STREAMED = 1500


class NoThreads:
    """Stands in for a thread pool: reads are over when they are submitted, steps can be counted."""

    def submit(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    def shutdown(self, **_: bool) -> None:
        pass


def token_of(adapter: str | None) -> int:
    """The only token that an adapter says."""
    return 1 + (0 if adapter is None else int(adapter, 16)) % 500


def one_token(prompt: tuple[int, ...], adapter: str | None) -> list[int]:
    return [token_of(adapter)] * 5000


async def collect(stream: RequestStream) -> list[int]:
    outputs: list[RequestOutput] = [output async for output in stream]
    assert outputs[-1].finished and outputs[-1].error is None
    return [token for output in outputs for delta in output.deltas for token in delta.token_ids]


async def ask(engine: ScriptedEngine, adapter: str | None, max_tokens: int) -> list[int]:
    number = engine.client.next_request_id()
    prompt = [3] * 40  # two full blocks and more, so that prefixes are published
    return await collect(
        await engine.client.generate(
            request(number, prompt, adapter=adapter, max_tokens=max_tokens)
        )
    )


def held(engine: ScriptedEngine, streaming: str | None = None) -> dict[str, int]:
    """What adapters take; of cached prefixes not those of `streaming`, which grow."""
    scheduler = engine.parts.core._scheduler
    lifecycle = scheduler._lifecycle
    published = lifecycle.blocks._published.values()
    return {
        "slots": len(engine.runner.slots),
        "known": len(lifecycle.slots._adapters),
        "host adapters": engine.parts.host.num_adapters,
        "host bytes": engine.parts.host.num_bytes,
        "disk": sum(1 for path in engine.cache_dir.iterdir() if len(path.name) == 64),
        "open files": psutil.Process().num_fds(),
        "prefix entries": sum(entry.adapter not in {None, streaming} for entry in published),
        "queues": sum(len(t.queues) for t in lifecycle.waiting.tenants.values()),
        "requests": sum(map(len, scheduler._requests.values())),
    }


async def unload(engine: ScriptedEngine, digest: str) -> None:
    engine.client.unload(digest)
    await ask(engine, None, 1)  # a step has run since


async def test_a_stream_keeps_its_version_over_twenty_swaps_that_leave_nothing_behind() -> None:
    async with scripted_engine(one_token) as engine:
        engine.parts.host._threads.shutdown()
        engine.parts.host._threads = NoThreads()
        first = digest_of(400)
        number = engine.client.next_request_id()
        stream = await engine.client.generate(
            request(number, [3] * 40, adapter=first, max_tokens=NUM_STREAMED)
        )
        seen = await anext(stream)
        before = held(engine, first)
        for version in range(20):
            digest = digest_of(version)
            if version == 0:
                engine.client.unload(first)  # replaced: it goes when the stream has ended
            assert await ask(engine, digest, 2) == [token_of(digest)] * 2, "only the new version"
            await unload(engine, digest)
            assert held(engine, first) == before
        assert engine.runner.slots[0].digest == first
        rest = await collect(stream)
        tokens = [token for delta in seen.deltas for token in delta.token_ids] + rest
        assert tokens == [token_of(first)] * NUM_STREAMED, "the old version to its end"
        await unload(engine, first)
        assert len(engine.fetched) == 21, "one fetch a version"
        assert held(engine)["slots"] == held(engine)["disk"] == held(engine)["host bytes"] == 0


async def test_a_hundred_rounds_of_load_request_and_unload_leave_what_was_before() -> None:
    async with scripted_engine(one_token) as engine:
        engine.parts.host._threads.shutdown()
        engine.parts.host._threads = NoThreads()  # a thread that deletes has a file open
        for round_number in range(3):  # what is made once is made
            await ask(engine, digest_of(round_number), 3)
            await unload(engine, digest_of(round_number))
        before = held(engine)
        assert before["slots"] == before["host bytes"] == before["prefix entries"] == 0
        for round_number in range(100):
            digest = digest_of(round_number)
            assert await ask(engine, digest, 3) == [token_of(digest)] * 3
            during = held(engine) if round_number % 10 == 0 else None
            await unload(engine, digest)
            if during is not None:
                assert during["slots"] == 1 and during["prefix entries"] >= 2
                assert during["host bytes"] > 0 and during["disk"] == 1
                assert held(engine) == before, f"after round {round_number}"
        assert held(engine) == before
        assert len(engine.fetched) == 103
