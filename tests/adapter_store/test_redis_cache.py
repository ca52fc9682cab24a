import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import pytest
from redis import Redis
from structlog import wrap_logger
from structlog.testing import LogCapture

from adapter_store.cache import redis_cache
from adapter_store.cache.redis_cache import RedisCache
from adapter_store.cache.shared import Found
from adapter_store.errors import ModelNotFound
from adapter_store.model_ref import ModelRef
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from tests.support.redis_server import RedisServer
from tests.support.registry import FINGERPRINT, FakeClock, counted_statements, digest_of, upload

pytestmark = pytest.mark.anyio

CALL_SECONDS = 1.0
"""Longer than the default: a busy machine is no outage."""


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - another process's move
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def connected(server: RedisServer, service: str = "s") -> AsyncGenerator[RedisCache]:
    async with RedisCache(server.url, service, call_seconds=CALL_SECONDS) as cache:
        await eventually(lambda: not cache.is_degraded)
        yield cache


async def test_what_one_process_wrote_another_finds_with_the_life_it_has_left(
    redis_server: RedisServer,
):
    async with connected(redis_server) as one, connected(redis_server) as two:
        found = await one.read("t:a", "k")
        assert (found.value, found.stamp) == (None, 0)
        await one.write("t:a", "k", b'{"x":1}', 0, 5.0)
        found = await two.read("t:a", "k")
        assert found.value == b'{"x":1}'
        assert 0 < found.life_seconds <= 5.0
        assert (await two.read("t:b", "k")).value is None
        await one.write("t:a", "dead", b"1", 0, 0.0004)
        assert (await two.read("t:a", "dead")).value is None


async def test_a_value_from_before_a_change_is_not_found_after_it(redis_server: RedisServer):
    async with connected(redis_server) as one, connected(redis_server) as two:
        found = await one.read("t:a", "k")  # then it reads the old row …
        await two.invalidate("t:a")
        assert found.stamp is not None
        await one.write("t:a", "k", b"1", found.stamp, 5.0)  # … and is late
        assert (await two.read("t:a", "k")).value is None
        found = await one.read("t:a", "k")
        assert found.stamp == 1
        await one.write("t:a", "k", b"2", 1, 5.0)
        assert (await two.read("t:a", "k")).value == b"2"


async def test_changes_are_told_to_the_others_and_not_to_oneself(redis_server: RedisServer):
    async with connected(redis_server) as one, connected(redis_server) as two:
        to_one: list[str | None] = []
        to_two: list[str | None] = []
        one.subscribe(to_one.append)
        two.subscribe(to_two.append)
        await one.invalidate("t:a")
        await two.invalidate("t:b")
        await eventually(lambda: bool(to_one and to_two))
        assert (to_one, to_two) == (["t:b"], ["t:a"])


async def test_services_on_one_server_know_nothing_of_each_other(redis_server: RedisServer):
    async with connected(redis_server, "one") as one, connected(redis_server, "two") as two:
        told: list[str | None] = []
        two.subscribe(told.append)
        await one.write("t:a", "k", b"1", 0, 5.0)
        await one.invalidate("t:a")
        assert (await two.read("t:a", "k")).stamp == 0
        await two.invalidate("t:x")
        assert (await one.read("t:x", "k")).stamp == 0
        assert told == []


async def test_strange_values_are_no_values(redis_server: RedisServer):
    async with connected(redis_server) as cache:
        await cache.write("t:a", "k", b"1", 0, 5.0)
        [name] = redis_server.names()
        with Redis(port=redis_server.port) as client:
            client.set(name, b"\xff not ours", px=5000)
        assert (await cache.read("t:a", "k")).value is None


async def test_a_stamp_that_is_no_number_is_an_outage_of_the_cache(redis_server: RedisServer):
    async with connected(redis_server) as cache:
        await cache.invalidate("t:a")
        [name] = redis_server.names()
        with Redis(port=redis_server.port) as client:
            client.set(name, b"\xff not ours")
            assert await cache.read("t:a", "k") == Found()
            await cache.invalidate("t:a")
            client.delete(name)
        await eventually(lambda: not cache.is_degraded)
        assert (await cache.read("t:a", "k")).stamp == 0


@pytest.mark.parametrize("outage", ["stopped", "frozen", "dropped"])
async def test_an_outage_costs_no_error_and_heals_by_itself_with_everything_forgotten(
    redis_server: RedisServer, outage: str
):
    async with connected(redis_server) as cache, connected(redis_server) as other:
        told: list[str | None] = []
        cache.subscribe(told.append)
        await cache.write("t:a", "k", b"1", 0, 60.0)
        if outage == "dropped":
            await asyncio.to_thread(redis_server.drop_connections)
            await eventually(lambda: None in told)
        else:
            with contextlib.ExitStack() as stack:
                if outage == "frozen":
                    stack.enter_context(redis_server.frozen())
                else:
                    await asyncio.to_thread(redis_server.stop)
                await eventually(lambda: cache.is_degraded)
                assert (await cache.read("t:a", "k")).stamp is None
                await cache.write("t:a", "k", b"1", 0, 60.0)
                await cache.invalidate("t:a")
                assert told == []
            if outage == "stopped":
                await asyncio.to_thread(redis_server.start)
        await eventually(lambda: not (cache.is_degraded or other.is_degraded))
        assert None in told
        told.clear()
        await other.invalidate("t:b")
        await eventually(lambda: "t:b" in told)


async def test_a_service_starts_without_its_cache_and_finds_it_later(redis_server: RedisServer):
    await asyncio.to_thread(redis_server.stop)
    async with RedisCache(redis_server.url, "s") as cache:
        assert cache.is_degraded
        assert (await cache.read("t:a", "k")).value is None
        await asyncio.to_thread(redis_server.start)
        await eventually(lambda: not cache.is_degraded)


# Registries of two processes on one database


class Process:
    """A registry with its own memory, clock and connection to Redis."""

    def __init__(self, url: str, server: RedisServer) -> None:
        self.clock = FakeClock()
        self.cache = RedisCache(server.url, url, call_seconds=CALL_SECONDS)
        self.registry = Registry(
            Database(url), clock=lambda: self.clock.now, monotonic=lambda: self.clock.monotonic,
            shared=self.cache,
        )  # fmt: skip


@contextlib.asynccontextmanager
async def two_processes(url: str, server: RedisServer) -> AsyncGenerator[tuple[Process, Process]]:
    one, two = Process(url, server), Process(url, server)
    await one.registry.create_tenant("acme")
    async with one.cache, two.cache:
        await eventually(lambda: not (one.cache.is_degraded or two.cache.is_degraded))
        yield one, two
    await one.registry.close()
    await two.registry.close()


async def test_two_processes_read_a_row_once(registry_url: str, redis_server: RedisServer):
    async with two_processes(registry_url, redis_server) as (one, two):
        plain = (await one.registry.create_key("acme")).plain
        await one.registry.register_version("acme", "a", upload("one"), FINGERPRINT)
        first = await one.registry.resolve("acme", ModelRef("a"))
        principal = await one.registry.authenticate(plain)
        with counted_statements(two.registry) as statements:
            assert await two.registry.resolve("acme", ModelRef("a")) == first
            assert await two.registry.authenticate(plain) == principal
        assert statements == []


async def test_a_change_by_one_process_is_seen_by_the_other_before_its_second_is_over(
    registry_url: str, redis_server: RedisServer
):
    async with two_processes(registry_url, redis_server) as (one, two):
        key = await one.registry.create_key("acme")
        await one.registry.register_version("acme", "a", upload("one"), FINGERPRINT)
        for _ in range(3):  # the clocks stand still: only events can tell
            assert await two.registry.authenticate(key.plain) is not None
            assert (await two.registry.resolve("acme", ModelRef("a"))).version == 1

        told: list[str | None] = []
        two.cache.subscribe(told.append)
        await one.registry.register_version("acme", "a", upload("two"), FINGERPRINT)
        await one.registry.revoke_key(key.key_id)
        await eventually(lambda: {"routes:acme/a", "keys:all"} <= set(told))
        assert (await two.registry.resolve("acme", ModelRef("a"))).digest == digest_of("two")
        assert await two.registry.authenticate(key.plain) is None

        await two.registry.delete_adapter("acme", "a")
        with pytest.raises(ModelNotFound):
            await two.registry.resolve("acme", ModelRef("a"))


async def test_nothing_of_a_deleted_tenant_is_found_by_the_next_one_of_its_name(
    registry_url: str, redis_server: RedisServer
):
    async with two_processes(registry_url, redis_server) as (one, two):
        for name in ("a", "b"):
            await one.registry.register_version("acme", name, upload(name), FINGERPRINT)
            for process in (one, two):  # the clocks stand still: nothing expires
                await process.registry.resolve("acme", ModelRef(name))
        told: list[str | None] = []
        two.cache.subscribe(told.append)
        await one.registry.delete_tenant("acme", with_usage=True)
        await one.registry.create_tenant("acme")
        await eventually(lambda: {"routes:acme/a", "routes:acme/b"} <= set(told))
        for process in (one, two):
            for name in ("a", "b"):
                with pytest.raises(ModelNotFound):
                    await process.registry.resolve("acme", ModelRef(name))


@pytest.mark.parametrize("outage", ["stopped", "frozen"])
async def test_without_redis_changes_are_seen_within_a_second(
    registry_url: str, redis_server: RedisServer, outage: str
):
    async with two_processes(registry_url, redis_server) as (one, two):
        key = await one.registry.create_key("acme")
        await one.registry.register_version("acme", "a", upload("one"), FINGERPRINT)
        assert await two.registry.authenticate(key.plain) is not None
        assert (await two.registry.resolve("acme", ModelRef("a"))).version == 1
        with contextlib.ExitStack() as stack:
            if outage == "frozen":
                stack.enter_context(redis_server.frozen())
            else:
                await asyncio.to_thread(redis_server.stop)
            await one.registry.register_version("acme", "a", upload("two"), FINGERPRINT)
            await one.registry.revoke_key(key.key_id)
            two.clock.advance(1.0)
            assert await two.registry.authenticate(key.plain) is None
            assert (await two.registry.resolve("acme", ModelRef("a"))).version == 2
        if outage == "stopped":
            await asyncio.to_thread(redis_server.start)
        await eventually(lambda: not (one.cache.is_degraded or two.cache.is_degraded))
        told: list[str | None] = []
        two.cache.subscribe(told.append)
        await one.registry.set_alias("acme", "a", "default", 1)
        await eventually(lambda: "routes:acme/a" in told)
        assert (await two.registry.resolve("acme", ModelRef("a"))).version == 1


async def test_keys_in_redis_end_by_themselves(registry_url: str, redis_server: RedisServer):
    async with two_processes(registry_url, redis_server) as (one, _):
        await one.registry.register_version("acme", "a", upload("one"), FINGERPRINT)
        await one.registry.resolve("acme", ModelRef("a"))
        names = redis_server.names()
        assert len(names) == 2  # a stamp, a value
        with Redis(port=redis_server.port) as client:
            lives = {name.split(":")[2]: client.pttl(name) for name in names}
        assert 0 < lives["value"] <= 1000
        assert 0 < lives["stamp"] <= 60_000


@pytest.mark.parametrize("url", ["", "http://host", "host:6379", "redis://host:port"])
def test_a_url_of_another_kind_is_refused(url: str):
    with pytest.raises(ValueError):
        RedisCache(url, "s")


async def test_a_redis_that_was_never_there_is_told_once(monkeypatch: pytest.MonkeyPatch):
    logs = LogCapture()
    monkeypatch.setattr(redis_cache, "_log", wrap_logger(None, processors=[logs]))
    async with RedisCache("redis://127.0.0.1:1", "s", call_seconds=CALL_SECONDS) as cache:
        assert cache.is_degraded
    assert [line["event"] for line in logs.entries] == ["shared_cache_unreachable"]
