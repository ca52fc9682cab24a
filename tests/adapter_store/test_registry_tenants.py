"""Tenants suspended and deleted, keys rotated and used."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from adapter_store.errors import (
    InvalidField,
    KeyInactive,
    KeyNotFound,
    ModelNotFound,
    NameTaken,
    RegistryUnavailable,
    TenantNotFound,
)
from adapter_store.model_ref import ModelRef
from adapter_store.registry.records import UsageRecord
from adapter_store.registry.registry import Registry
from tests.support.registry import FINGERPRINT, FakeClock, digest_of, open_registry, upload

pytestmark = pytest.mark.anyio

USED = UsageRecord(
    request_id="r1", tenant="acme", adapter="a", version=1, prompt_tokens=1, cached_tokens=0,
    output_tokens=1, finish_reason="stop",
)  # fmt: skip


async def fill(registry: Registry, tenant: str, *contents: str) -> None:
    for number, content in enumerate(contents):
        await registry.register_version(tenant, f"a{number}", upload(content), FINGERPRINT)


async def test_a_suspended_tenants_keys_say_so_at_once_and_until_it_goes_on(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        plain = (await registry.create_key("acme")).plain

        async def since():
            principal = await registry.authenticate(plain)
            assert principal is not None and principal.tenant is not None
            return principal.tenant.suspended_at

        assert await since() is None
        suspended = await registry.suspend_tenant("acme", actor="admin")
        assert await since() == clock.now == suspended.suspended_at
        clock.advance(9)
        assert await registry.suspend_tenant("acme") == suspended
        resumed = await registry.suspend_tenant("acme", suspended=False, actor="admin")
        assert (resumed.suspended_at, await since()) == (None, None)
        with pytest.raises(TenantNotFound):
            await registry.suspend_tenant("nobody")
        newest = [(e.action, e.actor) for e in await registry.list_audit(2, tenant="acme")]
        assert newest == [("tenant.resume", "admin"), ("tenant.suspend", "admin")]


async def test_a_deleted_tenant_leaves_its_usage_and_nothing_else(registry_url: str):
    async with open_registry(registry_url) as registry:
        plain = (await registry.create_key("acme")).plain
        await fill(registry, "acme", "ours", "both")
        await fill(registry, "zen", "both")
        await registry.register_version("acme", "b", upload("b"), FINGERPRINT, idempotency_key="k")
        assert await registry.authenticate(plain) is not None
        assert (await registry.resolve("acme", ModelRef("a0"))).version == 1
        unused = await registry.delete_tenant("acme")
        assert unused == sorted([digest_of("ours"), digest_of("b")])

        assert await registry.authenticate(plain) is None
        with pytest.raises(ModelNotFound):
            await registry.resolve("acme", ModelRef("a0"))
        for call in (registry.get_tenant, registry.list_adapters, registry.delete_tenant):
            with pytest.raises(TenantNotFound):
                await call("acme")
        assert [t.name for t in await registry.list_tenants()] == ["zen"]
        assert (await registry.resolve("zen", ModelRef("a0"))).digest == digest_of("both")
        await registry.record_usage(USED)  # of a request that was still running
        with pytest.raises(NameTaken, match="usage is kept"):
            await registry.create_tenant("acme")

        assert await registry.delete_tenant("acme", with_usage=True) == []
        await registry.create_tenant("acme")
        assert await registry.list_usage("acme") == []
        assert "tenant.delete" in {e.action for e in await registry.list_audit(tenant="acme")}


async def test_no_upload_lands_in_a_tenant_that_is_being_deleted(registry_url: str):
    async with open_registry(registry_url) as one, open_registry(registry_url) as two:
        results = await asyncio.gather(
            *(
                one.register_version("acme", f"n{i}", upload(f"{i}"), FINGERPRINT)
                for i in range(10)
            ),
            two.delete_tenant("acme", with_usage=True),
            return_exceptions=True,
        )
        assert isinstance(results[-1], list)
        assert all(isinstance(r, TenantNotFound) for r in results[:-1] if isinstance(r, Exception))
        live = await one.live_digests([digest_of(f"{i}") for i in range(10)])
        assert live == set()


async def test_a_rotated_keys_successor_works_and_the_old_one_ends_after_the_overlap(
    registry_url: str,
):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        old = await registry.create_key("acme", {"tenant", "inference"})
        new = await registry.rotate_key(old.key_id, timedelta(minutes=5), tenant="acme")
        assert new.info.scopes == old.info.scopes
        assert (new.info.tenant, new.info.expires_at) == ("acme", None)
        assert await registry.authenticate(new.plain) is not None
        clock.advance(299)
        assert await registry.authenticate(old.plain) is not None
        clock.advance(1)
        assert await registry.authenticate(old.plain) is None
        assert await registry.authenticate(new.plain) is not None
        with pytest.raises(KeyInactive):
            await registry.rotate_key(old.key_id, timedelta(0))
        at_once = await registry.rotate_key(new.key_id, timedelta(0))
        assert await registry.authenticate(new.plain) is None
        await registry.revoke_key(at_once.key_id)
        with pytest.raises(KeyInactive):
            await registry.rotate_key(at_once.key_id, timedelta(0))
        with pytest.raises(KeyNotFound):
            await registry.rotate_key(new.key_id, timedelta(0), tenant="zen")


async def test_a_successor_lives_as_long_as_its_forerunner_was_to(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        old = await registry.create_key("acme", expires_at=clock.now + timedelta(days=30))
        clock.advance(20 * 86_400)
        new = await registry.rotate_key(old.key_id, timedelta(days=90))
        assert new.info.expires_at == clock.now + timedelta(days=30)
        kept = {k.key_id: k.expires_at for k in await registry.list_keys("acme")}
        assert kept[old.key_id] == old.info.expires_at  # an overlap prolongs no life
        end = clock.now + timedelta(days=1)
        newer = await registry.rotate_key(new.key_id, timedelta(0), end)
        assert newer.info.expires_at == end
        with pytest.raises(InvalidField):
            await registry.rotate_key(newer.key_id, timedelta(0), clock.now)
        assert await registry.authenticate(newer.plain) is not None


async def test_a_key_that_never_ends_but_on_paper_can_be_rotated(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        last = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
        old = await registry.create_key("acme", expires_at=last)
        clock.advance(86_400)
        new = await registry.rotate_key(old.key_id, timedelta(0))
        assert new.info.expires_at is not None and new.info.expires_at >= last


async def test_the_last_use_of_a_key_is_written_behind_the_requests(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        used, unused = [await registry.create_key("acme") for _ in range(2)]

        async def last_uses():
            return {k.key_id: k.last_used_at for k in await registry.list_keys("acme")}

        for _ in range(3):
            await registry.authenticate(used.plain)
            clock.advance(10)
        assert await last_uses() == {used.key_id: None, unused.key_id: None}
        await registry.record_key_use()
        then = clock.now - timedelta(seconds=10)
        assert await last_uses() == {used.key_id: then, unused.key_id: None}
        clock.advance(60)
        await registry.record_key_use()
        assert (await last_uses())[used.key_id] == then


async def test_an_older_use_does_not_replace_a_newer_one_and_no_use_is_lost(
    registry_url: str, monkeypatch: pytest.MonkeyPatch
):
    slow, fast = FakeClock(), FakeClock()
    fast.advance(100)
    async with open_registry(registry_url, slow) as behind, open_registry(registry_url, fast) as on:
        key = await behind.create_key("acme")
        await behind.authenticate(key.plain)
        await on.authenticate(key.plain)

        async def refuse(work: object) -> None:
            raise RegistryUnavailable("gone")

        with monkeypatch.context() as outage:
            outage.setattr(on.database, "write", refuse)
            with pytest.raises(RegistryUnavailable):
                await on.record_key_use()
        await on.record_key_use()
        await behind.record_key_use()
        [info] = await on.list_keys("acme")
        assert info.last_used_at == fast.now


async def test_lists_come_in_pages_by_what_they_are_ordered_by(registry_url: str):
    async with open_registry(registry_url) as registry:
        await fill(registry, "acme", *"abcde")
        await registry.delete_adapter("acme", "a1")
        names: list[str] = []
        while page := await registry.list_adapters("acme", 2, names[-1] if names else ""):
            assert len(page) <= 2 and all(info.aliases == {"default": 1} for info in page)
            names += [info.name for info in page]
        assert names == ["a0", "a2", "a3", "a4"]
        assert [t.name for t in await registry.list_tenants(1)] == ["acme"]
        assert [t.name for t in await registry.list_tenants(5, "acme")] == ["zen"]

        everything = await registry.list_audit(1000)
        pages = await registry.list_audit(3)
        while page := await registry.list_audit(3, before=pages[-1].entry_id):
            pages += page
        assert pages == everything
        of_zen = await registry.list_audit(tenant="zen")
        assert of_zen == [e for e in everything if e.tenant == "zen"] != []


async def test_usage_of_a_tenant_that_is_gone_whole_is_refused(registry_url: str):
    async with open_registry(registry_url) as registry:
        await registry.delete_tenant("acme", with_usage=True)
        with pytest.raises(TenantNotFound):
            await registry.record_usage(replace(USED))
