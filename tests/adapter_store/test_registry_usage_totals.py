from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from adapter_store.registry.records import UsageRecord
from adapter_store.registry.registry import Registry
from tests.support.registry import FakeClock, open_registry

pytestmark = pytest.mark.anyio

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
RECORD = UsageRecord(
    request_id="", tenant="acme", adapter="legal", version=1, prompt_tokens=100, cached_tokens=64,
    output_tokens=20, finish_reason="stop", engine_seconds=0.25,
)  # fmt: skip


async def record(registry: Registry, clock: FakeClock, hours: float, *kinds: UsageRecord) -> None:
    clock.now = NOON + timedelta(hours=hours)
    await registry.record_usage(
        *(replace(kind, request_id=f"{hours}-{n}") for n, kind in enumerate(kinds))
    )


async def test_rows_are_summed_by_tenant_version_and_hour(registry_url: str):
    clock = FakeClock()
    other = replace(RECORD, version=2, output_tokens=1)
    base = replace(RECORD, adapter=None, version=None)
    theirs = replace(RECORD, tenant="zen")
    async with open_registry(registry_url, clock) as registry:
        await record(registry, clock, 0.0, RECORD, RECORD, other, base, theirs)
        await record(registry, clock, 0.99, RECORD)
        await record(registry, clock, 1.0, RECORD)
        await record(registry, clock, 24.5, base)

        async def sums(since: float, until: float, *groups: str, tenant: str | None = None):
            found = await registry.sum_usage(
                NOON + timedelta(hours=since), NOON + timedelta(hours=until), groups, tenant=tenant
            )
            return [
                (t.period, t.tenant, t.adapter, t.version, t.requests, t.output_tokens)
                for t in found
            ]

        at_12, at_13 = "2030-01-01T12:00:00Z", "2030-01-01T13:00:00Z"
        assert await sums(0, 24, "hour", "adapter", "tenant") == [
            (at_12, "acme", "base", None, 1, 20),
            (at_12, "acme", "legal", 1, 3, 60),
            (at_12, "acme", "legal", 2, 1, 1),
            (at_12, "zen", "legal", 1, 1, 20),
            (at_13, "acme", "legal", 1, 1, 20),
        ]
        assert await sums(0, 1, "tenant") == [
            (None, "acme", None, None, 5, 81), (None, "zen", None, None, 1, 20),
        ]  # fmt: skip
        assert await sums(0, 48, "tenant", tenant="ac\0me") == []
        assert await sums(0, 48, "day", tenant="acme") == [
            ("2030-01-01T00:00:00Z", None, None, None, 6, 101),
            ("2030-01-02T00:00:00Z", None, None, None, 1, 20),
        ]
        assert await sums(1, 1.5, "hour") == [(at_13, None, None, None, 1, 20)]
        assert await sums(-9, 0) == [(None, None, None, None, 0, 0)]
        assert await sums(-9, 0, "tenant") == []
        [total] = await registry.sum_usage(NOON, NOON + timedelta(days=2), ())
        assert (total.requests, total.prompt_tokens, total.cached_tokens) == (8, 800, 512)
        assert total.engine_seconds == pytest.approx(2.0)


async def test_hours_are_utcs_whatever_the_zone_of_the_session(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        await record(registry, clock, 11.75, RECORD)
        if "postgres" in registry_url:
            from sqlalchemy import text

            async with registry.database.engine.begin() as connection:
                name = registry.database.engine.url.database
                zone = text(f"ALTER DATABASE \"{name}\" SET timezone TO 'Asia/Kathmandu'")
                await connection.execute(zone)
            await registry.database.engine.dispose()
        try:
            [total] = await registry.sum_usage(NOON, NOON + timedelta(days=1), ("hour",))
            assert total.period == "2030-01-01T23:00:00Z"
        finally:
            if "postgres" in registry_url:
                async with registry.database.engine.begin() as connection:
                    await connection.execute(text(f'ALTER DATABASE "{name}" RESET timezone'))


async def test_a_deleted_tenants_usage_is_still_summed(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        await record(registry, clock, 0.0, RECORD)
        await registry.delete_tenant("acme")
        [total] = await registry.sum_usage(NOON, NOON + timedelta(days=1), ("tenant",))
        assert (total.tenant, total.requests) == ("acme", 1)
