import asyncio
from typing import Any

import pytest

from adapter_store.errors import ModelNotFound, RegistryUnavailable
from adapter_store.model_ref import ModelRef
from adapter_store.registry.cache import ReadThroughCache
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from tests.support.registry import (
    FINGERPRINT,
    FakeClock,
    counted_statements,
    digest_of,
    open_registry,
    upload,
)

pytestmark = pytest.mark.anyio


async def test_hot_requests_cost_no_sql(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        plain = (await registry.create_key("acme")).plain
        await registry.register_version("acme", "a", upload("one"), FINGERPRINT)
        with counted_statements(registry) as statements:
            await registry.authenticate(plain)
            await registry.resolve("acme", ModelRef("a"))
            cold = len(statements)
            assert cold > 0
            clock.advance(0.9)
            for _ in range(100):
                await registry.authenticate(plain)
                await registry.resolve("acme", ModelRef("a"))
            assert len(statements) == cold
            clock.advance(0.2)
            await registry.authenticate(plain)
            assert len(statements) > cold


async def test_changes_by_this_process_are_seen_at_once(registry_url: str):
    async with open_registry(registry_url) as registry:
        for content in ("one", "two"):
            await registry.register_version("acme", "a", upload(content), FINGERPRINT)
            resolved = await registry.resolve("acme", ModelRef("a"))
            assert resolved.digest == digest_of(content)
        await registry.set_alias("acme", "a", "default", 1)
        assert (await registry.resolve("acme", ModelRef("a"))).version == 1
        await registry.delete_adapter("acme", "a")
        with pytest.raises(ModelNotFound):
            await registry.resolve("acme", ModelRef("a"))
        await registry.register_version("acme", "a", upload("one"), FINGERPRINT)
        assert (await registry.resolve("acme", ModelRef("a"))).version == 3


async def test_changes_by_another_process_are_seen_within_a_second(registry_url: str):
    clock = FakeClock()
    async with (
        open_registry(registry_url, clock) as here,
        open_registry(registry_url, clock) as there,
    ):
        key = await here.create_key("acme")
        await here.register_version("acme", "a", upload("one"), FINGERPRINT)
        assert await here.authenticate(key.plain) is not None
        assert (await here.resolve("acme", ModelRef("a"))).version == 1
        await there.revoke_key(key.key_id)
        await there.register_version("acme", "a", upload("two"), FINGERPRINT)
        clock.advance(1.0)
        assert await here.authenticate(key.plain) is None
        assert (await here.resolve("acme", ModelRef("a"))).version == 2


async def test_a_read_that_began_before_a_change_is_not_kept():
    cache = ReadThroughCache("c", int, monotonic=lambda: 0.0)
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow_read() -> int:
        started.set()
        await go_on.wait()
        return 1  # from before the change

    async def read() -> int:
        return 2

    task = asyncio.create_task(cache.get("s", "k", slow_read))
    await started.wait()
    await cache.invalidate("s")
    go_on.set()
    assert await task == 1
    assert await cache.get("s", "k", read) == 2


async def test_what_is_not_there_is_not_remembered():
    cache = ReadThroughCache("c", int, monotonic=lambda: 0.0)
    answers = iter([None, 7])

    async def read() -> int | None:
        return next(answers)

    assert await cache.get("s", "k", read) is None
    assert await cache.get("s", "k", read) == 7
    assert await cache.get("s", "k", read) == 7


async def test_the_cache_is_bounded_and_its_oldest_entry_goes_first():
    cache = ReadThroughCache("c", int, max_entries=3, monotonic=lambda: 0.0)
    reads: list[int] = []

    async def get(key: int) -> None:
        async def read() -> int:
            reads.append(key)
            return key

        assert await cache.get(f"s{key}", str(key), read) == key

    for key in (1, 2, 3, 1, 4):
        await get(key)
    assert reads == [1, 2, 3, 4]
    await get(2)
    await get(3)
    assert reads == [1, 2, 3, 4]
    await get(1)
    assert reads == [1, 2, 3, 4, 1]


async def test_an_age_counts_from_before_the_read():
    now = [0.0]
    cache = ReadThroughCache("c", int, ttl_seconds=1.0, monotonic=lambda: now[0])

    async def read() -> int:
        now[0] += 0.8  # a slow database
        return 1

    await cache.get("s", "k", read)
    now[0] = 1.1
    count = now[0]
    await cache.get("s", "k", read)
    assert now[0] == count + 0.8


async def test_an_invalidation_is_of_its_scope_alone():
    cache = ReadThroughCache("c", int, monotonic=lambda: 0.0)
    reads: list[str] = []

    async def get(scope: str, key: str) -> None:
        async def read() -> int:
            reads.append(f"{scope}/{key}")
            return 1

        await cache.get(scope, key, read)

    for _ in range(2):
        for scope, key in (("acme", "a"), ("acme", "b"), ("zen", "a")):
            await get(scope, key)
        await cache.invalidate("acme")
    assert reads == ["acme/a", "acme/b", "zen/a", "acme/a", "acme/b"]


async def test_while_the_database_is_away_values_go_on_for_a_time_unless_they_changed():
    now = [0.0]
    cache = ReadThroughCache(
        "c", int, ttl_seconds=1.0, stale_seconds=60.0, monotonic=lambda: now[0]
    )

    async def read() -> int:
        return 1

    async def away() -> int:
        raise RegistryUnavailable("no answer")

    for key in ("a", "b"):
        await cache.get(key, key, read)
    now[0] = 60.9
    assert await cache.get("a", "a", away) == 1
    with pytest.raises(RegistryUnavailable):
        await cache.get("c", "c", away)
    await cache.invalidate("b")
    with pytest.raises(RegistryUnavailable):
        await cache.get("b", "b", away)
    now[0] = 61.0
    with pytest.raises(RegistryUnavailable):
        await cache.get("a", "a", away)


async def test_what_is_known_waits_but_a_moment_for_a_database_that_is_frozen():
    now = [0.0]
    cache = ReadThroughCache(
        "c", int, ttl_seconds=1.0, stale_seconds=60.0, patience_seconds=0.0,
        monotonic=lambda: now[0],
    )  # fmt: skip
    thawed = asyncio.Event()
    value = 1

    async def read() -> int:
        await thawed.wait()
        return value

    thawed.set()
    assert await cache.get("s", "k", read) == 1
    thawed.clear()
    value = 2
    now[0] = 2.0
    for _ in range(2):
        assert await cache.get("s", "k", read) == 1
    unknown = asyncio.create_task(cache.get("s", "another", read))
    await cache.invalidate("s")
    changed = asyncio.create_task(cache.get("s", "k", read))
    thawed.set()
    assert await asyncio.gather(unknown, changed) == [2, 2]
    assert await cache.get("s", "k", read) == 2


async def test_what_may_have_changed_unseen_is_read_again_and_goes_on_while_that_fails():
    clock, is_away = FakeClock(), False
    value = 1

    async def read() -> int:
        if is_away:
            raise RegistryUnavailable("away")
        return value

    cache = ReadThroughCache(
        "c", int, ttl_seconds=10, stale_seconds=60, monotonic=lambda: clock.monotonic
    )
    assert await cache.get("s", "k", read) == 1
    value = 2
    assert await cache.get("s", "k", read) == 1
    cache.doubt()
    assert await cache.get("s", "k", read) == 2
    is_away = True
    for _ in range(2):
        cache.doubt("s")
        clock.advance(34)
        assert await cache.get("s", "k", read) == 2
    clock.advance(2)
    with pytest.raises(RegistryUnavailable):
        await cache.get("s", "k", read)


async def test_nobody_waits_for_a_database_that_is_known_to_be_away_and_one_looks_for_it():
    now = [0.0]
    cache = ReadThroughCache(
        "c", int, ttl_seconds=1.0, stale_seconds=60.0, monotonic=lambda: now[0]
    )
    answers: asyncio.Queue[int | Exception] = asyncio.Queue()
    num_asked = 0

    async def read() -> int:
        nonlocal num_asked
        num_asked += 1
        answer = await answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    answers.put_nowait(1)
    assert await cache.get("s", "k", read) == 1
    now[0] = 2.0
    answers.put_nowait(RegistryUnavailable("no answer"))
    assert await cache.get("s", "k", read) == 1
    for _ in range(5):  # its answer would never come
        assert await cache.get("s", "k", read) == 1
        await settle()
    assert num_asked == 3
    answers.put_nowait(2)  # it is back
    await settle()
    assert await cache.get("s", "k", read) == 2
    now[0] = 4.0
    answers.put_nowait(3)
    assert await cache.get("s", "k", read) == 3


async def test_what_the_database_says_is_gone_is_not_served_while_it_is_away():
    now = [0.0]
    cache = ReadThroughCache(
        "c", int, ttl_seconds=1.0, stale_seconds=60.0, monotonic=lambda: now[0]
    )
    answers = iter([1, ModelNotFound("deleted"), RegistryUnavailable("no answer")])

    async def read() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await cache.get("s", "k", read) == 1
    now[0] = 1.0
    with pytest.raises(ModelNotFound):
        await cache.get("s", "k", read)
    with pytest.raises(RegistryUnavailable):
        await cache.get("s", "k", read)


class FlakyDatabase(Database):
    is_away = False

    async def read(self, work: Any) -> Any:
        if self.is_away:
            raise RegistryUnavailable("no answer")
        return await super().read(work)

    async def write(self, work: Any) -> Any:
        if self.is_away:
            raise RegistryUnavailable("no answer")
        return await super().write(work)


async def test_known_keys_and_adapters_go_on_while_the_database_is_away(registry_url: str):
    clock = FakeClock()
    database = FlakyDatabase(registry_url)
    registry = Registry(database, clock=lambda: clock.now, monotonic=lambda: clock.monotonic)
    await registry.create_tenant("acme")
    plain, revoked = [await registry.create_key("acme") for _ in range(2)]
    for name in ("a", "b"):
        await registry.register_version("acme", name, upload("one"), FINGERPRINT)
    for key in (plain, revoked):
        assert await registry.authenticate(key.plain) is not None
    for name in ("a", "b"):
        await registry.resolve("acme", ModelRef(name))
    await registry.revoke_key(revoked.key_id)
    await registry.register_version("acme", "b", upload("two"), FINGERPRINT)
    assert await registry.authenticate(plain.plain) is not None

    database.is_away = True
    clock.advance(60.0)
    assert await registry.authenticate(plain.plain) is not None
    assert (await registry.resolve("acme", ModelRef("a"))).version == 1
    with pytest.raises(RegistryUnavailable):  # known to have changed
        await registry.resolve("acme", ModelRef("b"))
    for failing in (
        registry.revoke_key(plain.key_id),
        registry.suspend_tenant("acme"),
        registry.register_version("acme", "a", upload("three"), FINGERPRINT),
        registry.set_alias("acme", "a", "beta", 1),
    ):
        with pytest.raises(RegistryUnavailable):
            await failing
        assert await registry.authenticate(plain.plain) is not None
        assert (await registry.resolve("acme", ModelRef("a"))).version == 1
    for other in (revoked.plain, "lpx_" + "x" * 43):
        with pytest.raises(RegistryUnavailable):
            await registry.authenticate(other)
    clock.advance(2.0)
    with pytest.raises(RegistryUnavailable):
        await registry.authenticate(plain.plain)
    assert (await registry.resolve("acme", ModelRef("a"))).version == 1
    database.is_away = False
    assert await registry.authenticate(plain.plain) is not None
    await registry.close()
