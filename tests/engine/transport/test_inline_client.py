"""The inline client keeps the promises of the real one, without sockets."""

import asyncio
import threading
from pathlib import Path

import pytest

from engine.errors import EngineUnavailable, RequestRefused
from engine.messages import RequestOutput
from engine.scheduled_batch import ScheduledBatch
from tests.support.scripted_engine import (
    EOS,
    ScriptedEngine,
    ScriptedRunner,
    digest_of,
    endless,
    request,
    scripted_engine,
)

pytestmark = pytest.mark.anyio
A = digest_of(1)


async def outputs_of(
    engine: ScriptedEngine, *prompt: int, adapter: str | None = None, n: int = 1
) -> list[RequestOutput]:
    new = request(engine.client.next_request_id(), prompt, adapter=adapter, n=n)
    return [output async for output in await engine.client.generate(new)]


def tokens_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    deltas = [delta for output in outputs for delta in output.deltas if delta.index == index]
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("threaded", [False, True])
async def test_many_requests_stream_to_their_end(threaded: bool) -> None:
    async with scripted_engine(threaded=threaded) as engine:
        results = await asyncio.gather(*(outputs_of(engine, 1 + n, 2, 3) for n in range(40)))
        for n, outputs in enumerate(results):
            assert tokens_of(outputs) == [1 + n, 2, 3, EOS]
            assert outputs[-1].finished and outputs[-1].timing is not None
        stats = await engine.client.stats()
        assert stats.running == stats.waiting == stats.kv_blocks_used == 0
        engine.parts.core.check_integrity()


async def test_choices_come_by_index() -> None:
    async with scripted_engine() as engine:
        outputs = await outputs_of(engine, 5, 6, n=3)
        assert [tokens_of(outputs, index) for index in range(3)] == [[5, 6, EOS]] * 3


async def test_adapters_are_fetched_once_and_answer_as_themselves() -> None:
    def reply(prompt: tuple[int, ...], adapter: str | None) -> list[int]:
        return [9 if adapter == A else 8]

    async with scripted_engine(reply) as engine:
        runs = [outputs_of(engine, 5, adapter=A) for _ in range(20)]
        results = await asyncio.gather(*runs, outputs_of(engine, 5))
        assert [tokens_of(outputs)[0] for outputs in results] == [9] * 20 + [8]
        assert engine.fetched == [A]
        assert (await engine.client.stats()).host_adapters == 1


async def test_a_fetch_that_fails_ends_the_request_with_its_code() -> None:
    def fetch(digest: str, cache_dir: Path) -> None:
        raise FileNotFoundError("no such blob")

    async with scripted_engine(fetch=fetch) as engine:
        [last] = await outputs_of(engine, 5, adapter=A)
        assert last.finished and last.error_code == "adapter_unavailable"


async def test_a_row_that_fails_fails_alone() -> None:
    runner = ScriptedRunner(failing_rows=frozenset([13]))
    async with scripted_engine(runner=runner) as engine:
        bad, good = await asyncio.gather(outputs_of(engine, 13), outputs_of(engine, 5))
        assert bad[-1].error_code == "sampling_failed" and good[-1].error_code is None


async def test_refusals_are_raised() -> None:
    async with scripted_engine() as engine:
        with pytest.raises(RequestRefused) as refusal:
            await engine.client.generate(request(1, [5] * 5000))
        assert refusal.value.code == "context_length_exceeded"


async def test_abort_frees_everything_and_is_harmless_twice() -> None:
    async with scripted_engine(endless) as engine:
        stream = await engine.client.generate(request(1, [5], max_tokens=2000))
        await anext(stream)
        engine.client.abort(1)
        engine.client.abort(1)
        engine.client.abort(99)
        stats = await engine.client.stats()
        assert stats.running == stats.waiting == stats.kv_blocks_used == 0
        assert [output async for output in stream] == []


async def test_abort_during_a_step_on_a_thread_waits_for_its_end() -> None:
    in_step, go_on = threading.Event(), threading.Event()

    def hold(batch: ScheduledBatch) -> None:
        in_step.set()
        assert go_on.wait(10)

    runner = ScriptedRunner(endless, before_step=hold)
    async with scripted_engine(runner=runner, threaded=True) as engine:
        await engine.client.generate(request(1, [5], max_tokens=2000))
        await asyncio.to_thread(in_step.wait, 10)
        engine.client.abort(1)
        go_on.set()
        stats = await engine.client.stats()
        assert stats.running == 0
        engine.parts.core.check_integrity()


async def test_a_failing_step_fails_what_is_pending_and_the_client() -> None:
    def fail(batch: ScheduledBatch) -> None:
        raise RuntimeError("the device fell off the bus")

    async with scripted_engine(runner=ScriptedRunner(before_step=fail)) as engine:
        with pytest.raises(EngineUnavailable):
            await outputs_of(engine, 5)
        assert not engine.client.is_ready
        with pytest.raises(EngineUnavailable):
            await engine.client.generate(request(2, [5]))
        with pytest.raises(EngineUnavailable):
            await engine.client.stats()


async def test_after_drain_no_request_is_taken() -> None:
    async with scripted_engine() as engine:
        stream = await engine.client.generate(request(1, [5]))
        await engine.client.drain()
        assert not engine.client.is_ready
        with pytest.raises(EngineUnavailable):
            await engine.client.generate(request(2, [5]))
        assert [output async for output in stream][-1].finished


async def test_leaving_fails_what_is_pending() -> None:
    async with scripted_engine(endless) as engine:
        stream = await engine.client.generate(request(1, [5], max_tokens=2000))
    with pytest.raises(EngineUnavailable):
        async for _ in stream:
            pass
