"""How an engine server ends: drained, at its deadline or by a failure; requests hear of it."""

import threading

import pytest

from engine.messages import (
    Accepted,
    Alive,
    Drain,
    Generate,
    Outputs,
    Refused,
)
from engine.scheduled_batch import ScheduledBatch
from tests.support.engine_server import LONG, server_thread
from tests.support.scripted_engine import (
    ScriptedRunner,
    UntilTold,
    digest_of,
    echo,
    endless,
    pace,
    request,
)

A = digest_of(1)


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
