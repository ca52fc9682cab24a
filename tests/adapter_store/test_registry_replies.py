"""Calls with an idempotency key: once, whatever is repeated, and for a day."""

import asyncio

import pytest
from sqlalchemy import func, select

from adapter_store.errors import AliasConflict, IdempotencyKeyReused
from adapter_store.model_ref import ModelRef
from adapter_store.registry.models import StoredReply
from adapter_store.registry.records import Canary, RegisteredVersion
from adapter_store.registry.registry import Registry
from tests.support.registry import FINGERPRINT, FakeClock, open_registry, upload

pytestmark = pytest.mark.anyio


async def push(registry: Registry, content: str, key: str | None, **kwargs: bool):
    return await registry.register_version(
        "acme", "a", upload(content), FINGERPRINT, idempotency_key=key, **kwargs
    )


async def num_stored(registry: Registry) -> int | None:
    return await registry.database.read(
        lambda s: s.scalar(select(func.count()).select_from(StoredReply))
    )


async def test_a_repeated_upload_gets_the_first_ones_reply_and_moves_nothing(registry_url: str):
    async with open_registry(registry_url) as registry:
        first = await push(registry, "one", "k1")
        assert (first.version, first.created, first.replayed) == (1, True, False)
        await push(registry, "two", "k2")
        again = await push(registry, "one", "k1")
        assert again == RegisteredVersion(
            "a", 1, first.digest, True, True, None, first.report, replayed=True
        )
        assert (await registry.resolve("acme", ModelRef("a"))).version == 2
        await registry.delete_adapter("acme", "a")
        assert (await push(registry, "one", "k1")).version == 1
        assert await registry.list_adapters("acme") == []


async def test_a_key_is_for_one_request_of_one_tenant(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one", "k1")
        with pytest.raises(IdempotencyKeyReused):
            await push(registry, "two", "k1")
        with pytest.raises(IdempotencyKeyReused):
            await push(registry, "one", "k1", publish=False)
        with pytest.raises(IdempotencyKeyReused):
            await registry.set_alias("acme", "a", "beta", 1, idempotency_key="k1")
        other = await registry.register_version(
            "zen", "a", upload("two"), FINGERPRINT, idempotency_key="k1"
        )
        assert not other.replayed
        assert len(await registry.list_versions("acme", "a")) == 1


async def test_a_guarded_move_can_be_repeated_with_its_key(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one", None)
        await push(registry, "two", None)

        async def move(key: str | None):
            return await registry.set_alias(
                "acme", "a", "default", 1, expect=2, canary=Canary(2, 0.5), idempotency_key=key
            )

        first = await move("k")
        assert (first.previous, first.replayed) == (2, False)
        again = await move("k")
        assert (again.previous, again.canary, again.replayed) == (2, Canary(2, 0.5), True)
        with pytest.raises(AliasConflict):
            await move(None)


async def test_a_refused_call_is_not_remembered(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one", None)
        with pytest.raises(AliasConflict):
            await registry.set_alias("acme", "a", "default", 1, expect=7, idempotency_key="k")
        assert await num_stored(registry) == 0
        await registry.set_alias("acme", "a", "beta", 1, idempotency_key="k")


async def test_a_key_is_forgotten_after_a_day(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        await push(registry, "one", "k")
        clock.advance(24 * 3600 - 1)
        assert (await push(registry, "one", "k")).replayed
        await registry.purge_replies()
        assert await num_stored(registry) == 1
        clock.advance(1)
        assert not (await push(registry, "two", "k")).replayed
        assert await num_stored(registry) == 1
        clock.advance(24 * 3600)
        await registry.purge_replies()
        assert await num_stored(registry) == 0


async def test_of_parallel_calls_with_one_key_one_counts(registry_url: str):
    async with open_registry(registry_url) as one, open_registry(registry_url) as two:
        made = await asyncio.gather(*(push(registry, "same", "k") for registry in [one, two] * 5))
        assert [m.replayed for m in made].count(False) == 1
        assert {(m.version, m.created) for m in made} == {(1, True)}
        assert await num_stored(one) == 1
