"""The service's client: streams, and tells at once when the engine is not there any more."""

import asyncio
import contextlib
import signal
from random import Random

import msgspec
import pytest
import uvloop
from structlog.testing import capture_logs

from engine.client import EngineClient, OnOrphans
from engine.errors import ClientClosed, EngineUnavailable, RequestRefused
from engine.messages import (
    RequestOutput,
)
from engine.transport.zmq_client import ZmqEngineClient
from tests.support.engine_server import (
    LONG,
    ServerThread,
    StandingClock,
    engine_process,
    run_dir,
    server_thread,
)
from tests.support.scripted_engine import (
    EOS,
    ScriptedRunner,
    UntilTold,
    digest_of,
    echo,
    endless,
    pace,
    request,
)
from tests.support.waiting import SECONDS, eventually, until_idle
from tests.support.zmq_clients import DEAD_AFTER, client_of

pytestmark = pytest.mark.anyio
A, B = digest_of(1), digest_of(2)


async def run(client: EngineClient, *prompt: int, adapter: str | None = None) -> RequestOutput:
    """Generate; the output tokens as one list and the last output."""
    stream = await client.generate(request(client.next_request_id(), prompt, adapter=adapter))
    tokens: list[int] = []
    async for output in stream:
        tokens += [token for delta in output.deltas for token in delta.token_ids]
        if output.finished:
            assert tokens == [*prompt, EOS] or output.error_code is not None
            return output
    raise AssertionError("the stream ended without a finished output")


async def test_requests_stream_to_their_end() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        async with client_of(server.socket_path) as client:
            assert client.is_ready and client.info.model == "scripted"
            last = await run(client, 5, 6, 7)
            assert last.timing is not None and last.error_code is None


async def test_when_a_client_closes_during_a_fetch_another_one_fetches() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        fetched: list[str] = []
        is_asked = asyncio.Event()

        async def never(digest: str) -> None:
            is_asked.set()
            await asyncio.Event().wait()

        stuck = ZmqEngineClient(server.socket_path, never, beat_seconds=0.1)
        await stuck.start()
        await stuck.wait_ready(SECONDS)
        waiting = asyncio.create_task(run(stuck, 5, adapter=A))
        await asyncio.wait_for(is_asked.wait(), SECONDS)
        async with client_of(server.socket_path, server.cache_dir, fetched=fetched) as other:
            answer = asyncio.create_task(run(other, 6, adapter=A))
            async with asyncio.timeout(SECONDS):
                while (await other.stats()).waiting < 2:
                    pass
            assert fetched == []  # one is asked at a time
            await stuck.close()
            with pytest.raises(EngineUnavailable):
                await waiting
            assert (await asyncio.wait_for(answer, SECONDS)).error_code is None
            assert fetched == [A]


async def test_calls_of_a_client_that_died_come_to_another_until_they_are_settled() -> None:
    def told(by: list[str]) -> OnOrphans:
        return lambda calls: by.extend(call.call for call in calls)

    async def begin(client: ZmqEngineClient, call: str) -> None:
        asked = request(client.next_request_id(), [5], max_tokens=100_000)
        stream = await client.generate(msgspec.structs.replace(asked, call=call))
        await anext(aiter(stream))

    first: list[str] = []
    second: list[str] = []
    third: list[str] = []
    with server_thread(ScriptedRunner(endless, before_step=pace)) as server:
        async with client_of(server.socket_path) as dying:
            for call in ("a", "b", "c"):
                await begin(dying, call)
            dying.settle(["c"])
            await dying.stats()
        async with client_of(server.socket_path) as heir:  # came when nobody was there
            heir.on_orphans(told(first))
            await eventually(lambda: len(first) == 2)
            heir.settle(["a"])
            await heir.stats()
        async with client_of(server.socket_path) as last, client_of(server.socket_path) as other:
            await asyncio.sleep(0.1)  # it is told who comes later, too
            last.on_orphans(told(second))
            other.on_orphans(told(third))
            await eventually(lambda: second + third == ["b"])
    assert first == ["a", "b"]


async def test_two_hundred_streams_at_once_and_nothing_is_left() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        async with client_of(server.socket_path) as client:
            await asyncio.gather(*(run(client, 1 + n, 2, 3) for n in range(200)))
            stats = await client.stats()
            assert stats.running == stats.waiting == stats.kv_blocks_used == 0
        server.check_integrity()


def test_it_works_under_uvloop() -> None:
    async def scenario(server: ServerThread) -> None:
        async with client_of(server.socket_path, server.cache_dir) as client:
            await asyncio.gather(*(run(client, 1 + n, 2) for n in range(50)))
            await run(client, 5, adapter=A)

    with (
        server_thread(ScriptedRunner(echo)) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(asyncio.wait_for(scenario(server), SECONDS))


async def test_refusals_are_raised_before_the_stream() -> None:
    # Encoding what is too large may take longer than a client may be silent.
    with server_thread(ScriptedRunner(echo), clock=StandingClock()) as server:
        async with client_of(server.socket_path) as client:
            with pytest.raises(RequestRefused) as refusal:
                await client.generate(request(1, [5] * 5000))
            assert refusal.value.code == "context_length_exceeded"
            with pytest.raises(RequestRefused) as refusal:
                await client.generate(request(2, [300_000] * 4_000_000))
            assert refusal.value.code == "request_too_large"
            assert (await run(client, 5)).error_code is None


async def test_before_the_engine_is_there_everything_says_so() -> None:
    with run_dir() as folder:
        async with client_of(folder / "none.sock", ready=False) as client:
            assert not client.is_ready
            with pytest.raises(EngineUnavailable):
                _ = client.info
            with pytest.raises(EngineUnavailable):
                await client.generate(request(1, [5]))
            with pytest.raises(EngineUnavailable):
                await client.stats()
            with pytest.raises(EngineUnavailable):
                await client.wait_ready(0.2)
            client.abort(1)
            client.unload(A)


async def test_a_cancelled_task_aborts_its_request_in_its_finally() -> None:
    with server_thread(ScriptedRunner(endless, before_step=pace)) as server:
        async with client_of(server.socket_path) as client:
            started = asyncio.Event()

            async def consume() -> None:
                stream = await client.generate(request(1, [5], max_tokens=2000))
                try:
                    async for _ in stream:
                        started.set()
                finally:
                    client.abort(1)

            task = asyncio.ensure_future(consume())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            client.abort(1)
            client.abort(12345)
            await until_idle(client)


async def test_a_task_cancelled_while_it_waits_for_acceptance_leaves_nothing_behind() -> None:
    with server_thread(ScriptedRunner(endless, before_step=pace)) as server:
        async with client_of(server.socket_path) as client:
            for number in range(1, 50):
                task = asyncio.ensure_future(client.generate(request(number, [5], max_tokens=2000)))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                    client.abort(number)
            stats = await client.stats()
            assert stats.running == stats.waiting == 0


async def test_five_hundred_random_aborts_under_load_leave_nothing_behind() -> None:
    random = Random(7)
    with server_thread(ScriptedRunner(endless)) as server:
        async with client_of(server.socket_path, server.cache_dir) as client:

            async def one(number: int) -> None:
                adapter = digest_of(random.randrange(12)) if random.random() < 0.5 else None
                new = request(number, [1 + number % 50] * 20, adapter=adapter, max_tokens=60)
                stream = await client.generate(new)
                for _ in range(random.randrange(6)):
                    if (await anext(stream)).finished:
                        return
                client.abort(number)
                if random.random() < 0.3:
                    client.abort(number)

            await asyncio.gather(*(one(number) for number in range(1, 501)))
            stats = await client.stats()
            assert stats.running == stats.waiting == stats.kv_blocks_used == 0
        server.check_integrity()


async def test_a_slow_consumer_gets_every_token_in_fewer_outputs() -> None:
    with server_thread(ScriptedRunner(endless)) as server:
        async with client_of(server.socket_path) as client:
            slow = await client.generate(request(1, [5], max_tokens=300))
            first = await anext(slow)
            await until_idle(client)
            rest = [output async for output in slow]
            deltas = [delta for output in [first, *rest] for delta in output.deltas]
            assert sum(len(delta.token_ids) for delta in deltas) == 300
            assert len(rest) <= 2 and rest[-1].finished


async def test_a_need_is_fetched_once_in_the_background() -> None:
    fetched: list[str] = []
    with server_thread(ScriptedRunner(echo)) as server:
        async with client_of(server.socket_path, server.cache_dir, fetched=fetched) as client:
            runs = [run(client, 5 + n, adapter=A) for n in range(100)]
            outputs = await asyncio.gather(*runs)
            assert all(output.error_code is None for output in outputs)
            assert fetched == [A]


async def test_a_fetch_that_fails_ends_that_adapters_requests_alone() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        async with client_of(server.socket_path, server.cache_dir, broken=frozenset([A])) as client:
            bad, good, base = await asyncio.gather(
                run(client, 5, adapter=A), run(client, 5, adapter=B), run(client, 5)
            )
            assert bad.error_code == "adapter_unavailable"
            assert good.error_code is None and base.error_code is None


async def test_kill_dash_nine_fails_what_is_pending_at_once_and_a_new_engine_serves() -> None:
    with engine_process() as process:
        process.start("slow")
        async with client_of(process.socket_path) as client:
            stream = await client.generate(request(1, [5], max_tokens=2000))
            await anext(stream)
            assert process.process is not None
            process.process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(DEAD_AFTER / 2):  # its silence would tell later
                with pytest.raises(EngineUnavailable):
                    async for _ in stream:
                        pass
            assert not client.is_ready
            with pytest.raises(EngineUnavailable):
                await client.generate(request(2, [5]))
            process.process.wait()

            process.start("echo")
            await client.wait_ready(SECONDS)
            assert (await run(client, 5, 6)).error_code is None
            assert (await client.stats()).running == 0


async def test_the_last_words_of_a_stopping_engine_arrive() -> None:
    with server_thread(ScriptedRunner(endless, before_step=pace), drain_seconds=0.2) as server:
        async with client_of(server.socket_path) as client:
            stream = await client.generate(request(1, [5], max_tokens=2000))
            await anext(stream)
            server.server.stop()
            await eventually(lambda: not client.is_ready)
            with pytest.raises(EngineUnavailable):
                await client.generate(request(2, [5]))
            outputs = [output async for output in stream]
            assert outputs[-1].error_code == "engine_stopped"


async def test_after_drain_no_request_is_taken_and_those_running_end_well() -> None:
    reply = UntilTold()
    with server_thread(ScriptedRunner(reply, before_step=pace), config=LONG) as server:
        async with client_of(server.socket_path) as client, client_of(server.socket_path) as other:
            stream = await client.generate(request(1, [5], max_tokens=100_000))
            await client.drain()
            assert not client.is_ready
            await eventually(lambda: not other.is_ready)
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await other.generate(request(1, [5]))
            reply.end()
            assert [output async for output in stream][-1].error_code is None


async def test_close_fails_what_is_pending_and_may_be_called_again() -> None:
    with server_thread(ScriptedRunner(endless, before_step=pace)) as server:
        async with client_of(server.socket_path) as client:
            stream = await client.generate(request(1, [5], max_tokens=2000))
            with capture_logs() as logs:
                await client.close()
            assert [log for log in logs if log["log_level"] == "warning"] == []
            with pytest.raises(ClientClosed, match="shutting down"):
                async for _ in stream:
                    pass
            assert not client.is_ready
            client.abort(1)
            client.unload(A)
            with pytest.raises(ClientClosed):
                await client.generate(request(2, [5]))
