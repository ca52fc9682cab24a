"""Changes of adapters through two API processes, without end and over their deaths."""

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from adapter_store.blobs import LocalBlobStore
from adapter_store.registry.models import (
    Adapter,
    AdapterVersion,
    Alias,
    Audit,
    Registration,
    StoredReply,
    Usage,
)
from tests.support.adapter_writer import Writer
from tests.support.api_processes import World
from tests.support.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

_TABLES = (Adapter, AdapterVersion, Alias, StoredReply, Registration, Usage, Audit)


async def test_processes_killed_at_random_points_lose_nothing_that_was_acknowledged(
    world: World, tmp_path: Path
):
    apis = world.apis
    random = Random(36)
    url, key = apis.service.url, apis.service.admin_key
    writers = [Writer(url, key, world.upload, f"written-{n}", n) for n in range(4)]
    stop = asyncio.Event()
    tasks = [asyncio.create_task(writer.run(stop)) for writer in writers]
    for _ in range(14):
        await asyncio.sleep(random.uniform(0.05, 1.0))
        victim = random.choice(apis.pids())
        os.kill(victim, signal.SIGKILL)
        await apis.until_replaced(victim)
    stop.set()
    await asyncio.gather(*tasks)
    report = await asyncio.to_thread(world.swept)
    assert report["missing"] == []
    report = await asyncio.to_thread(world.swept, "--dry-run")
    assert (report["orphans"], report["leftovers"], report["missing"]) == ([], 0, [])

    blobs = LocalBlobStore(apis.service.data_dir / "blobs")
    first, second = apis.pids()
    async with apis.client(first) as a, apis.client(second) as b:
        for writer in writers:
            path = f"/t/acme/v1/adapters/{writer.name}"
            listed = (await a.get(f"{path}/versions")).raise_for_status().json()["data"]
            digests = {version["version"]: version["digest"] for version in listed}
            writer.check(digests)
            for version, digest in digests.items():
                await blobs.fetch(digest, tmp_path / f"{writer.name}-{version}")
            asked = {"model": writer.name, "prompt": [1, 2], "max_tokens": 1}
            reply = await b.post("/t/acme/v1/completions", json=asked)
            assert reply.status_code == 200, reply.text


async def test_calls_over_deletes_and_uploads_are_of_one_version_whole_and_nothing_stays(
    world: World,
):
    apis = world.apis
    random = Random(26)
    blobs = LocalBlobStore(apis.service.data_dir / "blobs")

    async def ask(client: httpx.AsyncClient) -> str:
        """The whole text, or the code of the error that came instead or in the middle."""
        asked = {
            "model": "churn", "prompt": [1, 2, 3], "max_tokens": 24, "ignore_eos": True,
            "temperature": 0, "stream": True,
        }  # fmt: skip
        reply = await client.post("/t/acme/v1/completions", json=asked)
        if reply.status_code != 200:
            return reply.json()["error"]["code"]
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        if lines[-1] != "[DONE]":
            return json.loads(lines[-1])["error"]["code"]
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

    async with contextlib.AsyncExitStack() as stack:
        pids = apis.pids()
        a, b, *clients = [
            await stack.enter_async_context(apis.client(pids[n % 2])) for n in range(12)
        ]

        async def upload(kind: int) -> None:
            (await world.upload(a, "churn", (1, 120)[kind])).raise_for_status()

        async def left() -> tuple[list[str], int, list[str]]:
            stats = (await a.get("/admin/engine")).raise_for_status().json()
            return sorted(await blobs.list()), stats["host_adapters"], sorted(stats["resident"])

        before = await left()
        texts: list[str] = []
        for kind in (0, 1):
            await upload(kind)
            texts.append(await ask(a))
            (await a.delete("/t/acme/v1/adapters/churn")).raise_for_status()
        assert texts[0] != texts[1]
        seen: set[str] = set()
        for number in range(50):
            await upload(number % 2)
            calls = [asyncio.create_task(ask(client)) for client in clients]
            await asyncio.sleep(random.uniform(0, 0.3))
            (await b.delete("/t/acme/v1/adapters/churn")).raise_for_status()
            await upload(1 - number % 2)
            seen.update(await asyncio.gather(*calls))
            (await b.delete("/t/acme/v1/adapters/churn")).raise_for_status()
        assert {*texts} <= seen
        assert seen - {*texts} <= {"model_not_found", "adapter_unavailable"}
        await apis.until_over(a, "acme")
        async with asyncio.timeout(20):
            while await left() != before:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.1)


async def test_uploads_calls_and_deletes_through_both_processes_leave_nothing(
    world: World, redis_session: RedisServer
):
    apis = world.apis
    service = apis.service
    children = psutil.Process(service.process.pid).children
    first, second = apis.pids()

    blobs = LocalBlobStore(service.data_dir / "blobs")

    async def kept() -> dict[str, object]:
        """What must be as at the start."""
        return {
            "processes": sorted(child.pid for child in children()),
            "blobs": sorted(await blobs.list()),
            **{
                folder: sum(1 for _ in (service.data_dir / folder).rglob("*"))
                for folder in ("cache", "uploads")
            },
        }

    def names() -> set[str]:
        """A rate's window before this one is a name that comes with the turn of a minute."""
        return {name.removesuffix("/-1") for name in redis_session.names()}

    def memory() -> int:
        return sum(child.memory_info().rss for child in children())

    def num_files() -> int:
        return sum(child.num_fds() for child in children())

    async with apis.client(first) as a, apis.client(second) as b:
        both = (a, b)

        async def engine() -> dict[str, object]:
            stats = (await a.get("/admin/engine")).raise_for_status().json()
            names = ("running", "waiting", "kv_blocks_used", "host_adapters", "resident", "warm")
            return {name: stats[name] for name in names}

        async def changes() -> Counter[str]:
            """How often the audit trail tells of each kind of change to it."""
            counted: Counter[str] = Counter()
            page: dict[str, Any] = {"next": 2**62}
            while "next" in page:
                asked = {"tenant": "acme", "limit": 1000, "before": page["next"]}
                page = (await a.get("/admin/audit", params=asked)).raise_for_status().json()
                counted.update(
                    entry["action"]
                    for entry in page["data"]
                    if entry["subject"].startswith("fleeting")
                )
            return counted

        async def one_round(number: int) -> None:
            one, other = both[number % 2], both[(number // 2) % 2]
            (await world.upload(one, "fleeting", number)).raise_for_status()
            asked = {"model": "fleeting", "prompt": [1, 2, 3], "max_tokens": 2}
            (await other.post("/t/acme/v1/completions", json=asked)).raise_for_status()
            (await one.delete("/t/acme/v1/adapters/fleeting")).raise_for_status()

        before = {**await kept(), **await engine()}

        async def until_as_before() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30):
                    while {**await kept(), **await engine()} != before:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
            assert {**await kept(), **await engine()} == before

        for number in range(20):  # then what is built once is there
            await one_round(number)
        await until_as_before()
        names_before = names()
        memory_before, files_before = memory(), num_files()
        rows_before, changes_before = await world.count_rows(*_TABLES), await changes()
        for number in range(20, 120):
            await one_round(number)
        await until_as_before()
        calls = {"usage": 100, "audit": 300}  # an upload is a version and a move of the alias
        rows = {name: number + calls.get(name, 0) for name, number in rows_before.items()}
        async with asyncio.timeout(30):  # usage comes in groups
            while await world.count_rows(*_TABLES) != rows:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert await changes() - changes_before == dict.fromkeys(
            ("version.create", "alias.set", "adapter.delete"), 100
        )
        async with asyncio.timeout(30):  # some of those before expire by themselves
            while not names() <= names_before:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert num_files() <= files_before + 4
        assert memory() - memory_before < 16 * 2**20


async def test_a_stream_keeps_its_version_and_twenty_swaps_leave_every_count_flat(world: World):
    apis = world.apis
    children = psutil.Process(apis.service.process.pid).children
    first, second = apis.pids()

    def open_files_and_memory() -> tuple[int, int]:
        running = children()
        return (
            sum(child.num_fds() for child in running),
            sum(child.memory_info().rss for child in running),
        )

    async with apis.client(first) as a, apis.client(second) as b, apis.client(first) as c:

        async def complete(client: httpx.AsyncClient, model: str, max_tokens: int):
            asked = {
                "model": model, "prompt": [1, 2, 3], "max_tokens": max_tokens,
                "ignore_eos": True, "temperature": 0,
            }  # fmt: skip
            reply = await client.post("/t/acme/v1/completions", json=asked)
            return reply.raise_for_status()

        async def text() -> str:
            return (await complete(c, "swapped", 600)).json()["choices"][0]["text"]

        async def served_by(client: httpx.AsyncClient) -> str:
            return (await complete(client, "swapped", 2)).headers["x-loraplex-adapter"]

        async def swap(number: int) -> None:
            """Upload a version through one process, and delete the last through the other."""
            here, there = (a, b) if number % 2 else (b, a)
            (await world.upload(here, "swapped", 100 + number)).raise_for_status()
            newest = f"swapped@{number}"
            assert await served_by(here) == newest
            async with asyncio.timeout(10):
                while await served_by(there) != newest:
                    pass
            assert await served_by(there) == newest
            path = f"/t/acme/v1/adapters/swapped/versions/{number - 1}"
            (await there.delete(path)).raise_for_status()

        async def held() -> dict[str, object]:
            stats = (await a.get("/admin/engine")).raise_for_status().json()
            names = ("running", "waiting", "kv_blocks_used", "host_adapters", "host_adapter_bytes")
            return {
                **{name: stats[name] for name in names},
                "slots": len(stats["resident"]),
                "on disk": sum(1 for _ in (apis.service.data_dir / "cache").iterdir()),
                **await world.count_rows(Adapter, AdapterVersion, Alias),
            }

        async def loads_and_reads() -> tuple[float, int]:
            page = (await a.get("/metrics")).raise_for_status().text
            loads = sum(
                sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
                if sample.name == "loraplex_adapter_load_seconds_count"
                and sample.labels["adapter"] == "acme/swapped"
            )
            return loads, apis.log().count('"adapter_read"')

        (await world.upload(a, "swapped", 1)).raise_for_status()
        whole = await text()
        stream = await apis.stream(c, "swapped", 600)
        await swap(2)
        assert not stream.task.done(), "it was over before its version was replaced"
        for number in range(3, 7):  # then what is built once is there
            await swap(number)
        events = await stream.task
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == whole
        assert await text() != whole

        before, (loads, reads) = await held(), await loads_and_reads()
        files, memory = open_files_and_memory()
        for number in range(7, 27):
            await swap(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                while await held() != before:  # noqa: ASYNC110 - nothing tells when
                    await asyncio.sleep(0.1)
        assert await held() == before
        assert await loads_and_reads() == (loads + 20, reads + 20)
        files_after, memory_after = open_files_and_memory()
        assert files_after <= files + 4
        assert memory_after - memory < 16 * 2**20
