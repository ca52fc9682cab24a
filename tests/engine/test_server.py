"""The engine's loop over real sockets: nobody's bytes, death or slowness hurts anybody else."""

import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.client_socket import ClientSocket
from engine.errors import ConfigError
from engine.messages import (
    Abort,
    Accepted,
    Alive,
    Drain,
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
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import ScheduledBatch
from engine.server import EngineServer
from tests.support.engine_server import LONG, RawClient, run_dir, server_thread
from tests.support.scripted_engine import (
    EOS,
    ScriptedRunner,
    UntilTold,
    digest_of,
    echo,
    endless,
    put_fake_adapter,
    request,
    scripted_parts,
)
from tests.support.waiting import until

A = digest_of(1)


class Clock:
    """The server's, which stands still but for a test: nobody falls silent meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pace(batch: ScheduledBatch) -> None:
    """Steps of a millisecond or more, as a model's would be."""
    time.sleep(0.001)


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


def test_a_client_that_is_silent_for_two_seconds_loses_its_requests() -> None:
    clock, runner = Clock(), ScriptedRunner(endless, before_step=pace)
    with server_thread(runner, clock=clock, config=LONG) as server:
        watcher, silent = server.client(), server.joined_client()
        silent.send(Generate(request(1, [5], max_tokens=100_000)))
        silent.receive(Accepted)
        clock.now = 1.9
        for _ in range(3):
            before = watcher.stats().stats
            assert before.running + before.waiting == 1
        clock.now = 4.0  # whenever the last of its words was taken
        watcher.wait_idle()
        old_session = silent.session
        assert silent.join().session != old_session  # so it knows that its requests are gone


def test_a_client_that_disconnects_loses_its_requests() -> None:
    runner = ScriptedRunner(endless, before_step=pace)
    with server_thread(runner, clock=Clock(), config=LONG) as server:
        watcher, gone = server.joined_client(), server.joined_client()
        gone.send(Generate(request(1, [5], max_tokens=100_000)))
        gone.receive(Accepted)
        gone.close()
        watcher.wait_idle()


def test_a_long_step_is_not_held_against_a_client_that_beats() -> None:
    offset = [0.0]
    in_step, go_on = threading.Event(), threading.Event()

    def long_step(batch: ScheduledBatch) -> None:
        if not in_step.is_set():
            in_step.set()
            assert go_on.wait(10)
            # What was sent during the step has arrived before the loop looks.
            assert server.server._socket.socket.poll(5000)  # pyright: ignore[reportPrivateUsage]
            offset[0] = 60.0

    runner = ScriptedRunner(echo, before_step=long_step)
    with server_thread(runner, clock=lambda: time.monotonic() + offset[0]) as server:
        client = server.joined_client()
        client.send(Generate(request(1, [5, 6])))
        assert in_step.wait(10)
        client.send(Heartbeat())
        go_on.set()
        assert client.receive_last(1).error_code is None


def test_a_client_that_does_not_read_does_not_delay_others() -> None:
    with server_thread(ScriptedRunner(endless), clock=Clock(), config=LONG) as server:
        slow, fast = server.joined_client(RCVHWM=1), server.joined_client()
        sampling = SamplingParams(max_tokens=100_000, seed=0, temperature=0.0, logprobs=50)
        heavy = msgspec.structs.replace(request(1, [5], tenant="slow"), sampling=sampling)
        slow.send(Generate(heavy))
        socket = server.server._socket  # pyright: ignore[reportPrivateUsage]
        num_served_beside_backlog = 0
        for number in range(1, 500):
            fast.send(Generate(request(number, [number], max_tokens=20)))
            assert fast.receive_last(number).error_code is None
            num_served_beside_backlog += socket.has_backlog
            if num_served_beside_backlog == 10:
                return
        raise AssertionError("the slow client's queue was never full")


def test_a_client_that_does_not_read_for_five_seconds_is_dropped() -> None:
    with run_dir() as folder:
        socket = ClientSocket(folder / "s", patience=5.0)
        client = RawClient(folder / "s", RCVHWM=1)
        try:
            client.send(Hello())
            assert socket.socket.poll(5000)
            received = socket.receive()
            assert received is not None
            identity = received[0]
            while not socket.has_backlog:
                assert socket.send(identity, b"x" * 10_000, now=0.0)
            assert socket.send(identity, b"last", now=1.0)
            assert socket.flush(4.9) == []
            assert socket.flush(5.1) == [identity]
            socket.forget([identity])
            assert not socket.has_backlog
        finally:
            client.close()
            socket.close()


def test_a_backlog_is_sent_in_order_once_the_client_reads() -> None:
    with run_dir() as folder:
        socket = ClientSocket(folder / "s")
        client = RawClient(folder / "s", RCVHWM=1)
        try:
            client.send(Hello())
            assert socket.socket.poll(5000)
            received = socket.receive()
            assert received is not None
            sent = 0
            while not socket.has_backlog or sent % 10:
                assert socket.send(received[0], b"%08d" % sent + b"x" * 10_000, now=0.0)
                sent += 1
            raw = client._socket  # pyright: ignore[reportPrivateUsage]
            for number in range(sent):
                while not raw.poll(10):
                    assert socket.flush(0.0) == []
                assert raw.recv()[:8] == b"%08d" % number
            assert socket.flush(0.0) == [] and not socket.has_backlog
            assert not socket.send(b"nobody", b"x", now=0.0)
        finally:
            client.close()
            socket.close()


def test_a_hundred_cold_requests_are_one_need() -> None:
    with server_thread(ScriptedRunner(echo), clock=Clock()) as server:
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
    with server_thread(runner, clock=Clock(), config=LONG) as server:
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
    clock, runner = Clock(), ScriptedRunner(endless, before_step=pace)
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


def test_stop_finishes_what_runs_and_refuses_the_rest() -> None:
    reply = UntilTold()
    with server_thread(ScriptedRunner(reply, before_step=pace), config=LONG) as server:
        client = server.joined_client()
        client.send(Generate(request(1, [5], max_tokens=100_000)))
        client.receive(Outputs)
        server.server.stop()
        while not client.receive(Alive).draining:
            pass
        client.send(Generate(request(2, [5])))
        assert client.receive(Refused).code == "draining"
        reply.end()
        last = client.receive_last(1)
        assert last.error_code is None and last.deltas[0].finish_reason == "stop"
        assert server.join() == 0
        assert not server.socket_path.exists()


def test_a_refusal_while_draining_has_its_own_code() -> None:
    with server_thread(ScriptedRunner(endless, before_step=pace)) as server:
        client, late = server.joined_client(), server.client()
        client.send(Generate(request(1, [5], max_tokens=1000)))
        client.receive(Accepted)
        client.send(Drain())
        client.send(Generate(request(2, [5])))
        assert client.receive(Refused).code == "draining"
        late.join()
        assert late.receive(Alive).draining


@pytest.mark.parametrize("num_stops", [1, 2])
def test_what_still_runs_or_loads_at_the_deadline_or_second_signal_gets_a_last_output(
    num_stops: int,
) -> None:
    runner = ScriptedRunner(endless, before_step=pace)
    drain_seconds = 0.2 if num_stops == 1 else 600.0
    with server_thread(runner, drain_seconds=drain_seconds, config=LONG) as server:
        running, loading = server.joined_client(), server.joined_client()
        running.send(Generate(request(1, [5], max_tokens=100_000)))
        running.receive(Outputs)
        loading.send(Generate(request(1, [5], adapter=A)))  # whose files nobody brings
        loading.receive(Accepted)
        assert loading.stats().stats.waiting == 1
        for _ in range(num_stops):
            server.server.stop()
        for client in (running, loading):
            last = client.receive_last(1)
            assert last.error_code == "engine_stopped" and last.error
        assert server.join() == 0


def test_a_failing_step_ends_all_requests_with_an_error_and_the_server_with_one() -> None:
    are_queued = threading.Event()

    def fail(batch: ScheduledBatch) -> None:
        pace(batch)
        if are_queued.is_set():
            raise RuntimeError("the device fell off the bus")

    with server_thread(ScriptedRunner(endless, before_step=fail), config=LONG) as server:
        clients = [server.joined_client(), server.joined_client()]
        for client in clients:
            client.send(Generate(request(1, [5], max_tokens=100_000)))
            client.receive(Accepted)
        are_queued.set()
        for client in clients:
            last = client.receive_last(1)
            assert last.error_code == "engine_error"
            assert "bus" not in (last.error or "")
        assert server.join() == 1


def test_a_request_that_the_core_cannot_take_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_thread(ScriptedRunner(echo)) as server:
        add = server.parts.core.add

        def add_or_fail(client: object, new: object) -> None:
            if new.tenant == "poison":  # type: ignore[attr-defined]
                raise KeyError("poison")
            add(client, new)  # type: ignore[arg-type]

        monkeypatch.setattr(server.parts.core, "add", add_or_fail)
        client = server.joined_client()
        client.send(Generate(request(1, [5], tenant="poison")))
        assert client.receive(Refused).code == "engine_error"
        client.send(Generate(request(2, [5])))
        assert client.receive_last(2).error_code is None


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
