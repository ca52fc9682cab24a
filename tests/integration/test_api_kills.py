"""`kill -9` of API processes at random points of changes: nothing acknowledged is lost."""

import asyncio
from pathlib import Path
from random import Random

import httpx
import pytest

from adapter_store.blobs import LocalBlobStore
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from adapter_store.sweeper import find_missing
from loraplex.housekeeping import sweep_orphans
from tests.support.adapter_writer import Writer
from tests.support.forked_apis import ForkedApis, forked_apis
from tests.support.service import ADMIN_KEY, adapter_files

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NUM_KILLS = 50


async def upload(client: httpx.AsyncClient, name: str, number: int) -> httpx.Response:
    config, weights = adapter_files(seed=number)
    return await client.post(
        "/t/acme/v1/adapters",
        data={"name": name},
        files={"config": ("c", config), "weights": ("w", weights)},
    )


async def until_serving(apis: ForkedApis) -> None:
    """Make the tenant, once somebody answers."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=apis.url, headers=headers, timeout=60) as client:
        reply = await client.post("/admin/tenants", json={"name": "acme"})
        assert reply.status_code == 201, reply.text


async def test_killed_at_fifty_random_points_nothing_acknowledged_is_lost(
    tmp_path: Path, registry_url: str
):
    random = Random(50)
    number = 1 if registry_url.startswith("sqlite") else 2  # as `serve` has it
    with forked_apis(tmp_path, registry_url, number) as apis:
        await until_serving(apis)
        writers = [Writer(apis.url, ADMIN_KEY, upload, f"w{n}", seed=n) for n in range(4)]
        stop = asyncio.Event()
        tasks = [asyncio.create_task(writer.run(stop)) for writer in writers]
        for _ in range(NUM_KILLS):
            before = sum(writer.num_acknowledged for writer in writers)
            async with asyncio.timeout(30):  # so that each kill falls among calls that are served
                while sum(w.num_acknowledged for w in writers) < before + 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await asyncio.sleep(random.uniform(0, 0.03))
            apis.kill(random.randrange(len(apis.processes)))
            apis.start()
        stop.set()
        await asyncio.gather(*tasks)
    assert sum(writer.num_cut for writer in writers) > NUM_KILLS / 2, "the kills cut few calls"

    blobs = LocalBlobStore(tmp_path / "blobs")
    registry = Registry(Database(registry_url))
    try:
        missing = await find_missing(blobs, registry.live_digests, registry.digests_in_use)
        assert missing == [], "a version's files are gone"
        for writer in writers:
            versions = await registry.list_versions("acme", writer.name)
            writer.check({info.version: info.digest for info in versions})
            for info in versions:
                await blobs.fetch(info.digest, tmp_path / f"{writer.name}-{info.version}")
        await sweep_orphans(registry, blobs, 0)
        report = await sweep_orphans(registry, blobs, 0, dry_run=True)
        assert report is not None and (report.orphans, report.leftovers) == ((), 0)
    finally:
        await registry.close()
