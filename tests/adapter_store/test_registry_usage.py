from dataclasses import replace

import pytest

from adapter_store.errors import TenantNotFound
from adapter_store.registry.records import UsageRecord
from tests.support.registry import FINGERPRINT, FakeClock, digest_of, open_registry, upload

pytestmark = pytest.mark.anyio

RECORD = UsageRecord(
    request_id="req-1",
    tenant="acme",
    adapter="support",
    version=3,
    prompt_tokens=100,
    cached_tokens=64,
    output_tokens=20,
    finish_reason="stop",
    queue_seconds=0.25,
    load_seconds=0.125,
    prefill_seconds=0.5,
    decode_seconds=2.0,
)


async def test_usage_comes_back_as_it_was_recorded(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        await registry.record_usage(RECORD)
        clock.advance(1)
        base = replace(RECORD, request_id="req-2", adapter=None, version=None)
        await registry.record_usage(base)
        newest, oldest = await registry.list_usage("acme")
        assert newest == replace(base, created_at=clock.now)
        assert oldest.created_at is not None and replace(oldest, created_at=None) == RECORD
        assert await registry.list_usage("acme", limit=1) == [newest]


async def test_a_repeated_write_counts_once(registry_url: str):
    async with open_registry(registry_url) as registry:
        await registry.record_usage(RECORD)
        other = replace(RECORD, request_id="req-2")
        await registry.record_usage(replace(RECORD, output_tokens=99), other, other)
        rows = {row.request_id: row.output_tokens for row in await registry.list_usage("acme")}
        assert rows == {"req-1": 20, "req-2": 20}


async def test_a_tenant_sees_its_own_usage_only(registry_url: str):
    async with open_registry(registry_url) as registry:
        await registry.record_usage(RECORD, replace(RECORD, request_id="z", tenant="zen"))
        assert [r.request_id for r in await registry.list_usage("acme")] == ["req-1"]
        assert [r.request_id for r in await registry.list_usage("zen")] == ["z"]
        with pytest.raises(TenantNotFound):
            await registry.list_usage("nobody")


async def test_usage_of_an_unknown_tenant_stores_nothing(registry_url: str):
    async with open_registry(registry_url) as registry:
        with pytest.raises(TenantNotFound):
            await registry.record_usage(RECORD, replace(RECORD, request_id="x", tenant="nobody"))
        assert await registry.list_usage("acme") == []


async def test_usage_outlives_the_adapter(registry_url: str):
    async with open_registry(registry_url) as registry:
        await registry.register_version("acme", "support", upload("one"), FINGERPRINT)
        await registry.record_usage(replace(RECORD, version=1))
        await registry.delete_adapter("acme", "support")
        [row] = await registry.list_usage("acme")
        assert (row.adapter, row.version) == ("support", 1)


async def test_every_change_leaves_an_audit_entry_and_no_refused_one_does(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        await registry.create_tenant("blue", 2.0, actor="admin")
        key = await registry.create_key("blue", actor="admin")
        for content in ("one", "two"):
            await registry.register_version("blue", "a", upload(content), FINGERPRINT, actor="k")
        await registry.set_alias("blue", "a", "default", 1, actor="k")
        await registry.delete_version("blue", "a", 2, actor="k")
        await registry.delete_adapter("blue", "a", actor="k")
        await registry.revoke_key(key.key_id, actor="admin")
        with pytest.raises(TenantNotFound):
            await registry.create_key("nobody", actor="admin")

        entries = [e for e in reversed(await registry.list_audit()) if e.tenant == "blue"]
        assert [(e.actor, e.action, e.subject) for e in entries] == [
            ("admin", "tenant.create", "blue"),
            ("admin", "key.create", key.key_id),
            ("k", "version.create", "a@1"),
            ("k", "alias.set", "a:default"),
            ("k", "version.create", "a@2"),
            ("k", "alias.set", "a:default"),
            ("k", "alias.set", "a:default"),
            ("k", "version.delete", "a@2"),
            ("k", "adapter.delete", "a"),
            ("admin", "key.revoke", key.key_id),
        ]
        assert entries[2].detail["digest"] == digest_of("one")
        assert entries[6].detail == {"version": 1, "previous": 2}
        assert {e.created_at for e in entries} == {clock.now}
        assert "nobody" not in {e.tenant for e in await registry.list_audit()}
