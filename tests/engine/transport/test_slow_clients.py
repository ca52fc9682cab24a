"""Clients that fall silent, leave or do not read; and long steps, which are not their fault."""

import threading
import time

import msgspec

from engine.messages import (
    Accepted,
    Generate,
    Heartbeat,
    Hello,
)
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import ScheduledBatch
from engine.transport.client_socket import ClientSocket
from tests.support.engine_server import LONG, RawClient, StandingClock, run_dir, server_thread
from tests.support.scripted_engine import (
    ScriptedRunner,
    echo,
    endless,
    pace,
    request,
)


def test_a_client_that_is_silent_for_two_seconds_loses_its_requests() -> None:
    clock, runner = StandingClock(), ScriptedRunner(endless, before_step=pace)
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
    with server_thread(runner, clock=StandingClock(), config=LONG) as server:
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
    with server_thread(ScriptedRunner(endless), clock=StandingClock(), config=LONG) as server:
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
