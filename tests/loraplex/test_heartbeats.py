"""API processes say that they are alive; shares of a rate are among those."""

import contextlib

import pytest
from limits.aio.storage import MemoryStorage
from redis import Redis

from loraplex.heartbeats import SILENT_SECONDS, Heartbeats
from loraplex.limits.rate_counter import RateCounter
from loraplex.limits.shared_rates import SharedRates
from tests.support.redis_server import RedisServer
from tests.support.service import running_service

pytestmark = pytest.mark.anyio


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def member(server: RedisServer, clock: Clock, service: str = "one") -> Heartbeats:
    """Beats only when a test says so."""
    return Heartbeats(server.url, service, expected=4, clock=clock, beat_seconds=3600)


def ids(heartbeats: Heartbeats) -> set[str]:
    return {process.id for process, _ in heartbeats.alive()}


async def test_processes_of_one_service_see_each_other_until_one_falls_silent(
    redis_server: RedisServer,
):
    clock = Clock()
    async with member(redis_server, clock) as a, member(redis_server, clock) as b:
        async with member(redis_server, clock, "another service") as stranger:
            await a.beat()
            assert ids(a) == ids(b) == {a.me.id, b.me.id}
            assert ids(stranger) == {stranger.me.id}
        clock.now += SILENT_SECONDS + 0.1
        await b.beat()
        assert ids(b) == {b.me.id} and b.num_alive == 1
        await a.beat()
        await b.beat()
        assert b.num_alive == 2


async def test_one_that_died_before_the_clock_was_set_back_is_not_alive_till_then(
    redis_server: RedisServer,
):
    clock = Clock()
    async with member(redis_server, clock) as dead, member(redis_server, clock) as a:
        await a.beat()
        assert ids(a) == {a.me.id, dead.me.id}
        clock.now -= 3600.0
        await a.beat()
        assert ids(a) == {a.me.id}
        await dead.beat()  # it was not
        await a.beat()
        assert ids(a) == {a.me.id, dead.me.id}


async def test_a_member_that_is_none_of_ours_is_not_alive(redis_server: RedisServer):
    async with member(redis_server, Clock()) as a:
        [name] = redis_server.names()
        with Redis(port=redis_server.port) as client:
            client.zadd(name, {b"\xff not ours": Clock.now})
        await a.beat()
        assert ids(a) == {a.me.id} and a.num_alive == 1


async def test_one_that_ends_is_gone_at_once_and_silence_leaves_nothing(redis_server: RedisServer):
    clock = Clock()
    async with member(redis_server, clock) as a:
        async with member(redis_server, clock):
            await a.beat()
            assert a.num_alive == 2
        await a.beat()
        assert a.num_alive == 1
    assert redis_server.names() == []


async def test_without_redis_those_count_that_were_alive_or_were_started(
    redis_server: RedisServer,
):
    clock = Clock()
    async with member(redis_server, clock) as a, member(redis_server, clock) as b:
        await a.beat()
        with contextlib.ExitStack() as stack:
            stack.enter_context(redis_server.frozen())
            await a._try_to_beat()
            assert a.num_alive == 2 and ids(a) == {a.me.id, b.me.id}
            async with member(redis_server, clock) as late:
                assert late.num_alive == 4 and ids(late) == {late.me.id}
    assert Heartbeats().num_alive == 1


async def test_a_rate_is_shared_out_among_those_that_are_alive():
    num_alive = 2

    class Away(RateCounter):
        async def take(self, key, limit, amount):
            raise ConnectionError

    rates = SharedRates(Away(MemoryStorage()), num_processes=lambda: num_alive)
    assert (await rates.take("k", 12, 1)).limit == 6
    num_alive = 3
    assert (await rates.take("k", 12, 1)).limit == 4


async def test_an_admin_sees_who_is_alive(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        found = (await admin.get("/admin/processes")).raise_for_status().json()
        [process] = found["data"]
        assert process["answered"] and not found["degraded"]
        async with service.client("acme:tenant") as tenant:
            assert (await tenant.get("/admin/processes")).status_code == 403
