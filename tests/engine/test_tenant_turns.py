"""Places that tenants take in turns."""

import asyncio

import pytest

from engine.tenant_turns import TenantTurns

pytestmark = pytest.mark.anyio


async def test_a_tenant_has_one_place_and_all_together_no_more_than_there_are():
    turns = TenantTurns(2)
    release, are_both_there = asyncio.Event(), asyncio.Event()
    begun: list[str] = []

    async def work(tenant: str) -> None:
        async with turns.of(tenant):
            begun.append(tenant)
            if len(begun) == 2:
                are_both_there.set()
            await release.wait()

    async with asyncio.TaskGroup() as group:
        for tenant in ("hog", "hog", "hog", "acme", "zen"):
            group.create_task(work(tenant))
        await are_both_there.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert begun == ["hog", "acme"]
        release.set()
    assert begun[:3] == ["hog", "acme", "zen"] and begun[3:] == ["hog", "hog"]


async def test_who_gives_up_waiting_holds_up_nobody():
    turns = TenantTurns(1)

    async def work(tenant: str) -> str:
        async with turns.of(tenant):
            return tenant

    async with turns.of("hog"):
        waiting = [asyncio.create_task(work(tenant)) for tenant in ("acme", "acme", "zen")]
        await asyncio.sleep(0)
        waiting[0].cancel()
    assert await asyncio.gather(*waiting[1:]) == ["acme", "zen"]
