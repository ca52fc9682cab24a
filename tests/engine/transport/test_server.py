"""The engine's loop over real sockets: nobody's bytes, death or slowness hurts anybody else."""

import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.errors import ConfigError
from engine.messages import (
    Abort,
    Accepted,
    Alive,
    EndCalls,
    EngineMessage,
    FetchFailed,
    Generate,
    Have,
    Heartbeat,
    Hello,
    Need,
    Outputs,
    Refused,
    Unload,
    Welcome,
)
from engine.transport.client_socket import ClientSocket
from engine.transport.server import EngineServer
from tests.support.engine_server import LONG, RawClient, StandingClock, run_dir, server_thread
from tests.support.scripted_engine import (
    EOS,
    ScriptedRunner,
    digest_of,
    echo,
    endless,
    pace,
    put_fake_adapter,
    request,
    scripted_parts,
)
from tests.support.waiting import until

A = digest_of(1)


def test_a_request_is_accepted_and_streamed_one_message_a_step() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        client = server.client()
        welcome = client.join()
        assert welcome.generation == 1 and welcome.info.model == "scripted"
        client.send(Generate(request(1, [5, 6, 7])))
        client.send(Generate(request(2, [8])))
        accepted: list[int] = []
        tokens: dict[int, list[int]] = {1: [], 2: []}
        finished: set[int] = set()
        while len(finished) < 2:
            # Either kind: the first request may stream before the second one is read.
            message = client.receive(Accepted | Outputs)
            if isinstance(message, Accepted):
                accepted.append(message.request_id)
                continue
            for output in message.outputs:
                assert output.request_id in accepted
                tokens[output.request_id] += [t for d in output.deltas for t in d.token_ids]
                if output.finished:
                    finished.add(output.request_id)
                    assert output.timing is not None and output.error_code is None
        assert tokens == {1: [5, 6, 7, EOS], 2: [8, EOS]}
        assert accepted == [1, 2]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"\x91" * 5000],
        [b"a", b"b", b"c"],
        [b"\x81\xa4type\xa7nothing"],
        [b"\x82\xa4type\xa8generate\xa7request\x80"],
        [b"\x82\xa4type\xa5abort\xaarequest_id\xa1x"],
    ],
    ids=["empty", "reserved", "deep", "frames", "unknown", "fields", "types"],
)
def test_malformed_messages_are_dropped_and_hurt_nobody(frames: list[bytes]) -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        good, bad = server.joined_client(), server.joined_client()
        for _ in range(50):
            bad.send_frames(*frames)
        good.send(Generate(request(1, [5, 6])))
        assert good.receive_last(1).error_code is None
        bad.send(Generate(request(1, [9])))
        assert bad.receive_last(1).error_code is None


def test_a_message_of_no_known_client_is_ignored_until_it_says_hello() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        client = server.client()
        client.send(Generate(request(1, [5]), session=7))
        client.send(Abort(1))
        client.send(Have(A))
        assert client.try_receive(0.3) is None
        client.join()
        assert client.stats().stats.running == 0


def test_a_request_of_an_older_session_is_dropped() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        client = server.joined_client()
        client.send(Generate(request(1, [5]), session=client.session - 1))
        client.send(Generate(request(2, [6])))
        assert client.receive(Accepted).request_id == 2


def test_hello_again_keeps_the_session_and_the_requests() -> None:
    with server_thread(ScriptedRunner(endless, before_step=pace), config=LONG) as server:
        client = server.joined_client()
        client.send(Generate(request(1, [5], max_tokens=100_000)))
        client.receive(Accepted)
        client.send(Hello())
        assert client.receive(Welcome).session == client.session
        after = client.stats().stats
        assert after.running + after.waiting == 1


def test_refusals_say_why() -> None:
    with server_thread(ScriptedRunner(endless, before_step=pace)) as server:
        client = server.joined_client()
        client.send(Generate(request(1, [5] * 3000)))
        refused = client.receive(Refused)
        assert (refused.request_id, refused.code) == (1, "context_length_exceeded")
        assert refused.limit is not None
        client.send(Generate(request(2, [5], adapter="../../etc/passwd")))
        assert client.receive(Refused).code == "invalid_adapter"
        client.send(Generate(request(3, [5], max_tokens=1000)))
        client.send(Generate(request(3, [5], max_tokens=1000)))
        assert client.receive(Refused).code == "duplicate_request_id"


def test_aborts_of_unknown_and_ended_requests_are_harmless() -> None:
    with server_thread(ScriptedRunner(endless, before_step=pace), config=LONG) as server:
        client = server.joined_client()
        client.send(Abort(99))
        client.send(Generate(request(1, [5], max_tokens=100_000)))
        client.receive(Accepted)
        client.send(Abort(1))
        client.send(Abort(1))
        client.wait_idle()
        assert client.stats().stats.kv_blocks_used == 0
        server.check_integrity()


def test_a_hundred_cold_requests_are_one_need() -> None:
    with server_thread(ScriptedRunner(echo), clock=StandingClock()) as server:
        clients = [server.joined_client(), server.joined_client()]
        for number in range(1, 51):
            for client in clients:
                client.send(Generate(request(number, [number], adapter=A)))
        needs: list[RawClient] = []
        num_accepted, last = 0, set[tuple[RawClient, int]]()

        def take(message: EngineMessage | None, client: RawClient) -> None:
            nonlocal num_accepted
            match message:
                case Accepted():
                    num_accepted += 1
                case Need():
                    assert message.digest == A
                    needs.append(client)
                case Outputs():
                    assert all(output.error_code is None for output in message.outputs)
                    last.update((client, o.request_id) for o in message.outputs if o.finished)
                case _:
                    pass

        def take_until(condition: Callable[[], bool]) -> None:
            def look() -> bool:
                for client in clients:
                    take(client.try_receive(0.01), client)
                return condition()

            until(look)

        take_until(lambda: num_accepted == 100 and bool(needs))
        put_fake_adapter(server.cache_dir, A)
        needs[0].send(Have(A))
        take_until(lambda: len(last) == 100)
        assert len(needs) == 1


def test_when_a_client_dies_during_a_fetch_another_is_asked() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        first = server.joined_client()
        first.send(Generate(request(1, [5], adapter=A)))
        assert first.receive(Need).digest == A
        second = server.joined_client()
        second.send(Generate(request(1, [6], adapter=A)))
        second.receive(Accepted)
        first.close()
        assert second.receive(Need).digest == A
        put_fake_adapter(server.cache_dir, A)
        second.send(Have(A))
        assert second.receive_last(1).error_code is None


def end_calls(tenant: str, adapter: str | None = None, version: int | None = None) -> EndCalls:
    return EndCalls(tenant=tenant, adapter=adapter, version=version, code="over", reason="Gone.")


@pytest.mark.parametrize(
    ("order", "ended"),
    [
        (end_calls("acme"), {"base", "legal@1", "legal@12", "legal-2@1"}),
        (end_calls("acme", "legal"), {"legal@1", "legal@12"}),
        (end_calls("acme", "legal", 1), {"legal@1"}),
        (end_calls("acme", "legal", 2), set[str]()),
        (end_calls("acme", "base"), set[str]()),
    ],
    ids=["tenant", "adapter", "version", "unused version", "an adapter called base"],
)
def test_one_clients_order_ends_the_calls_of_all_clients_that_it_concerns(
    order: EndCalls, ended: set[str]
) -> None:
    runner = ScriptedRunner(endless, before_step=pace)
    with server_thread(runner, clock=StandingClock(), config=LONG) as server:
        put_fake_adapter(server.cache_dir, A)
        clients = [server.joined_client(), server.joined_client()]
        labels = ["base", "legal@1", "legal@12", "legal-2@1"]
        for client in clients:
            for number, label in enumerate(labels):
                adapter = None if label == "base" else A
                asked = request(number, [5], adapter=adapter, max_tokens=100_000)
                client.send(Generate(msgspec.structs.replace(asked, label=label)))
            foreign = request(99, [5], tenant="zen", adapter=A, max_tokens=100_000)
            client.send(Generate(msgspec.structs.replace(foreign, label="legal@1")))
            for _ in range(len(labels) + 1):
                client.receive(Accepted)
        clients[0].send(order)
        for client in clients:
            left = {number for number, label in enumerate(labels) if label in ended}
            while left:
                for output in client.receive(Outputs).outputs:
                    if output.finished:
                        assert (output.error_code, output.error) == ("over", "Gone.")
                        left.remove(output.request_id)
        stats = clients[0].stats().stats
        assert stats.running + stats.waiting == 2 * (len(labels) - len(ended) + 1)


def test_an_order_with_a_strange_label_about_hurts_nobody() -> None:
    with server_thread(ScriptedRunner(endless, before_step=pace), config=LONG) as server:
        put_fake_adapter(server.cache_dir, A)
        client = server.joined_client()
        for number, label in enumerate(["legal@x", "", "@", "legal@1@1"]):
            asked = request(number, [5], adapter=A, max_tokens=100_000)
            client.send(Generate(msgspec.structs.replace(asked, label=label)))
            client.receive(Accepted)
        client.send(end_calls("acme", "legal", 1))
        stats = client.stats().stats
        assert stats.running + stats.waiting == 4


def test_a_failed_fetch_ends_the_adapters_requests_alone_and_is_tried_again() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        client = server.joined_client()
        client.send(Generate(request(1, [5], adapter=A)))
        assert client.receive(Need).digest == A
        client.send(FetchFailed(A, "the blob store is down"))
        last = client.receive_last(1)
        assert last.error_code == "adapter_unavailable" and "blob store" in (last.error or "")
        client.send(Generate(request(2, [5], adapter=A)))
        assert client.receive(Need).digest == A
        put_fake_adapter(server.cache_dir, A)
        client.send(Have(A))
        assert client.receive_last(2).error_code is None
        client.send(Generate(request(3, [5])))
        assert client.receive_last(3).error_code is None


def test_unload_drops_an_adapter_from_disk_once_it_is_idle() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        client = server.joined_client()
        put_fake_adapter(server.cache_dir, A)
        client.send(Generate(request(1, [5], adapter=A)))
        client.receive_last(1)
        client.send(Unload(A))
        client.send(Unload("../../etc"))
        until(lambda: not (server.cache_dir / A).exists())
        assert client.stats().stats.resident == []
        assert client.stats().stats.host_adapters == 0


def test_the_engine_beats_twice_a_second_idle_and_busy() -> None:
    clock, runner = StandingClock(), ScriptedRunner(endless, before_step=pace)
    with server_thread(runner, clock=clock, config=LONG) as server:
        client = server.joined_client()
        for _ in range(2):
            for _ in range(2):
                client.send(Heartbeat())
                clock.now += 0.5
                client.receive(Alive)
            client.send(Generate(request(1, [5], max_tokens=100_000)))


def test_an_idle_engine_sleeps() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        client = server.joined_client()
        client.send(Generate(request(1, [5])))
        client.receive_last(1)
        before = time.process_time()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            client.try_receive(0.25)
            client.send(Heartbeat())
        assert time.process_time() - before < 0.5


def test_the_socket_is_private_and_an_open_folder_is_refused() -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        assert stat.S_IMODE(server.socket_path.stat().st_mode) == 0o600
    with run_dir() as folder:
        folder.chmod(0o755)
        parts = scripted_parts(ScriptedRunner(), folder / "cache")
        with pytest.raises(ConfigError, match="0700"):
            EngineServer(parts, socket_path=folder / "engine.sock", generation=1)
        parts.close()


def test_a_path_that_cannot_be_bound_is_a_config_error() -> None:
    with run_dir() as folder, pytest.raises(ConfigError, match="cannot bind"):
        ClientSocket(Path(str(folder / ("x" * 120))))
