"""A tenant's rate is one rate, whichever API process is asked."""

import asyncio
from collections import Counter

import pytest

from tests.support.api_processes import Both, World

pytestmark = pytest.mark.anyio


async def test_two_processes_let_no_more_pass_than_the_limit(world: World, both: Both):
    a, b = both
    asked = {"model": "base", "prompt": [1], "max_tokens": 1}
    quota = "/admin/tenants/zen/quota"
    (await a.put(quota, json={"requests_per_minute": 6})).raise_for_status()
    try:
        replies = await asyncio.gather(
            *(c.post("/t/zen/v1/completions", json=asked) for c in both for _ in range(6))
        )
        assert Counter(reply.status_code for reply in replies) == {200: 6, 429: 6}
        left = {
            reply.headers["x-ratelimit-remaining-requests"]
            for reply in replies
            if reply.status_code == 429
        }
        assert left == {"0"}
    finally:
        (await b.put(quota, json={})).raise_for_status()


async def test_both_processes_are_listed_as_alive_whoever_is_asked(world: World, both: Both):
    async with asyncio.timeout(30):
        for client, pid in zip(both, world.apis.pids(), strict=True):
            while True:
                listed = (await client.get("/admin/processes")).raise_for_status().json()["data"]
                if {process["pid"] for process in listed} == set(world.apis.pids()):
                    break
                await asyncio.sleep(0.1)
            assert [p["pid"] for p in listed if p["answered"]] == [pid]
