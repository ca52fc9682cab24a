"""Two API processes behave as one, and the death of one is its own clients' alone."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from adapter_store.blobs import LocalBlobStore
from tests.support.api_processes import Both, World

pytestmark = pytest.mark.anyio

LONG = 4000
"""Tokens of a stream that outlasts whatever happens to it."""


async def seen_within_a_second(look: Callable[[], Awaitable[bool]]) -> None:
    """A call that begins later than that must see the change, however slow the machine is."""
    changed = time.monotonic()
    while True:
        began = time.monotonic()
        if await look():
            return
        assert began - changed < 1.0
        await asyncio.sleep(0.02)


async def test_what_one_process_changes_the_other_sees_within_a_second(world: World, both: Both):
    a, b = both
    made = (await a.post("/admin/tenants/acme/keys", json={})).raise_for_status().json()
    headers = {"authorization": f"Bearer {made['key']}"}
    for client in both:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200

    async def served_by(client: httpx.AsyncClient) -> str:
        asked = {"model": "seen", "prompt": [1], "max_tokens": 1}
        reply = await client.post("/v1/completions", json=asked, headers=headers)
        return reply.headers.get("x-loraplex-adapter", str(reply.status_code))

    for version, (here, there) in enumerate([(a, b), (b, a), (a, b)], start=1):
        (await world.upload(here, "seen", version)).raise_for_status()
        assert await served_by(here) == f"seen@{version}"

        async def is_newest(there: httpx.AsyncClient = there, version: int = version) -> bool:
            return await served_by(there) == f"seen@{version}"

        await seen_within_a_second(is_newest)

    async def is_rolled_back() -> bool:
        return await served_by(b) == "seen@1"

    path = "/t/acme/v1/adapters/seen/aliases/default"
    (await a.put(path, json={"version": 1, "expect": 3})).raise_for_status()
    await seen_within_a_second(is_rolled_back)

    async def is_out() -> bool:
        return (await b.get("/v1/models", headers=headers)).status_code == 401

    key_id = made["id"]
    (await a.delete(f"/admin/tenants/acme/keys/{key_id}")).raise_for_status()
    assert (await a.get("/v1/models", headers=headers)).status_code == 401
    await seen_within_a_second(is_out)


async def test_calls_end_in_both_processes_with_their_version_and_with_their_tenant(
    world: World, both: Both
):
    a, b = both
    apis = world.apis
    for number in (1, 2):
        (await world.upload(a, "ended", number)).raise_for_status()
    async with contextlib.AsyncExitStack() as stack:
        pids = [apis.pids()[0], apis.pids()[1]]
        clients = [
            await stack.enter_async_context(apis.client(pid)) for pid in pids for _ in range(4)
        ]
        models = ["ended@1", "ended@2", "base"] * 2
        streams = [
            await apis.stream(client, model, LONG)
            for client, model in zip([*clients[:3], *clients[4:7]], models, strict=True)
        ]
        others = [await apis.stream(clients[n], "base", LONG, "zen") for n in (3, 7)]
        (await a.delete("/t/acme/v1/adapters/ended/versions/1?abort=true")).raise_for_status()
        for ended in streams[0::3]:
            assert await ended.code() == "version_deleted"
        assert not any(s.task.done() for s in (*streams[1::3], *streams[2::3], *others))
        (await b.post("/admin/tenants/acme/suspend")).raise_for_status()
        for ended in (*streams[1::3], *streams[2::3]):
            assert await ended.code() == "tenant_suspended"
        assert not any(other.task.done() for other in others)
        (await b.post("/admin/tenants/acme/resume")).raise_for_status()
        for other in others:
            other.task.cancel()


async def test_two_processes_let_no_more_pass_than_the_limit(world: World, both: Both):
    a, _ = both
    (await a.post("/admin/tenants", json={"name": "rated"})).raise_for_status()
    quota = {"requests_per_minute": 6}
    (await a.put("/admin/tenants/rated/quota", json=quota)).raise_for_status()
    asked = {"model": "base", "prompt": [1], "max_tokens": 1}
    replies = await asyncio.gather(
        *(c.post("/t/rated/v1/completions", json=asked) for c in both for _ in range(6))
    )
    assert Counter(reply.status_code for reply in replies) == {200: 6, 429: 6}
    left = {
        reply.headers["x-ratelimit-remaining-requests"]
        for reply in replies
        if reply.status_code == 429
    }
    assert left == {"0"}


async def test_both_processes_are_listed_as_alive_whoever_is_asked(world: World, both: Both):
    async with asyncio.timeout(30):
        for client, pid in zip(both, world.apis.pids(), strict=True):
            while True:
                listed = (await client.get("/admin/processes")).raise_for_status().json()["data"]
                if {process["pid"] for process in listed} == set(world.apis.pids()):
                    break
                await asyncio.sleep(0.1)
            assert [p["pid"] for p in listed if p["answered"]] == [pid]


async def test_a_killed_process_takes_only_its_own_streams_with_it(world: World):
    apis = world.apis
    dead, alive = apis.pids()
    async with (
        apis.client(dead) as lost, apis.client(alive) as kept, apis.client(alive) as watch,
    ):  # fmt: skip
        broken = await apis.stream(lost, "base", LONG)
        whole = await apis.stream(kept, "base", 300)
        os.kill(dead, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await broken.task
        assert (await whole.task)[-1] == "[DONE]"
        await apis.until_over(watch, "acme")
        row = await world.row_of(broken)
        assert (row.finish_reason, row.prompt_tokens, row.adapter) == ("abort", 3, None)
        assert row.output_tokens >= len(broken.events) > 0
        bystander = await apis.stream(kept, "base", 400)
        await apis.until_replaced(dead)
        assert (await bystander.task)[-1] == "[DONE]"


async def test_a_frozen_process_hurts_nobody_else_and_is_replaced(world: World):
    apis = world.apis
    frozen, alive = apis.pids()
    async with (
        apis.client(frozen) as lost, apis.client(alive) as kept, apis.client(alive) as watch,
    ):  # fmt: skip
        held = await apis.stream(lost, "base", LONG)
        whole = await apis.stream(kept, "base", 400, "zen")
        os.kill(frozen, signal.SIGSTOP)
        await apis.until_over(watch, "acme")
        assert frozen in apis.pids(), "its calls ended before it was given up"
        assert (await whole.task)[-1] == "[DONE]"
        with pytest.raises(httpx.TransportError):
            await held.task
        row = await world.row_of(held)
        assert (row.finish_reason, row.output_tokens >= len(held.events)) == ("abort", True)
    await apis.until_replaced(frozen)
    assert '"child_silent"' in apis.log()


async def test_fifty_uploads_of_one_name_and_deletes_leave_a_row_and_files_for_each_version(
    world: World, both: Both, tmp_path: Path
):
    random = Random(7)
    apis = world.apis
    path = "/t/acme/v1/adapters/storm"
    pids = apis.pids()

    async def worker(number: int, client: httpx.AsyncClient) -> dict[str, Any] | None:
        # Some contents come twice: the same files, uploaded and deleted at once.
        reply = await world.upload(client, "storm", number % 40)
        assert reply.status_code in (200, 201), reply.text
        version = reply.json()
        if random.random() < 0.5:
            gone = await client.delete(f"{path}/versions/{version['version']}")
            # An alias may point to it, and with equal files somebody else may have deleted it.
            assert gone.status_code in (204, 404, 409), gone.text
            return version if gone.status_code == 409 else None
        return version

    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(apis.client(pids[n % 2])) for n in range(10)
        ]  # each takes one call at a time

        async def share(n: int) -> list[dict[str, Any] | None]:
            return [await worker(number, clients[n]) for number in range(n, 50, 10)]

        done = await asyncio.gather(*(share(n) for n in range(10)))
    kept = [version for of_one in done for version in of_one if version is not None]
    a, b = both
    listed = (await a.get(f"{path}/versions")).raise_for_status().json()["data"]
    again = (await b.get(f"{path}/versions")).raise_for_status().json()["data"]
    assert listed == again
    numbers = [version["version"] for version in listed]
    assert len(set(numbers)) == len(numbers) and set(numbers) <= {v["version"] for v in kept}
    blobs = LocalBlobStore(apis.service.data_dir / "blobs")
    everything = [
        version["digest"]
        for adapter in (await a.get("/t/acme/v1/adapters")).json()["data"]
        for version in (await a.get(f"/t/acme/v1/adapters/{adapter['name']}/versions")).json()[
            "data"
        ]
    ]
    assert sorted(set(everything)) == sorted(await blobs.list())
    for number, version in enumerate(listed[:10]):
        await blobs.fetch(version["digest"], tmp_path / str(number))  # hashed on the way
        asked = {"model": f"storm@{version['version']}", "prompt": [1, 2], "max_tokens": 1}
        reply = await (a, b)[number % 2].post("/t/acme/v1/completions", json=asked)
        assert reply.status_code == 200, reply.text
    report = await asyncio.to_thread(world.swept, "--dry-run")
    assert (report["orphans"], report["missing"]) == ([], [])


async def test_a_stop_drains_both_processes(world: World):
    apis = world.apis
    await apis.until(lambda: len(apis.pids()) == 2)
    first, second = apis.pids()
    async with apis.client(first) as a, apis.client(second) as b, apis.client(first) as c:
        short = [await apis.stream(client, "base", 60) for client in (a, b)]
        cut = await apis.stream(c, "base", 8000)
        apis.service.process.send_signal(signal.SIGTERM)
        for stream in short:
            assert (await stream.task)[-1] == "[DONE]"
        assert await cut.code() == "shutting_down"
    assert await asyncio.to_thread(apis.service.process.wait, 60) == 0
