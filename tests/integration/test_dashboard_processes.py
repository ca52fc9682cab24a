"""The dashboard over two API processes and a recorder: sessions end, and what was written stays."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import psutil
import pytest

from tests.support.api_processes import ApiProcesses, Both, World

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SESSION = "/dashboard/api/session"


async def log_in(client: httpx.AsyncClient, url: str, key: str) -> str:
    """The cookie of a new session, as a header has it."""
    reply = await client.post(SESSION, json={"key": key}, headers={"origin": url})
    assert reply.status_code == 200, reply.text
    return reply.headers["set-cookie"].partition(";")[0]


async def watched_end(
    apis: ApiProcesses, pid: int, cookie: str, begun: asyncio.Event
) -> tuple[str, float]:
    """Read a stream of one process to its end; the reason, and when it came."""
    async with (
        apis.client(pid) as client,
        client.stream("GET", "/dashboard/api/events", headers={"cookie": cookie}) as reply,
    ):
        assert reply.status_code == 200
        last = ""
        async for line in reply.aiter_lines():
            if line == "event: live":
                begun.set()
            if line.startswith("data: "):
                last = line.removeprefix("data: ")
    return json.loads(last)["reason"], time.monotonic()


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await look():  # noqa: ASYNC110 - other processes change it
            await asyncio.sleep(0.1)


async def overview(client: httpx.AsyncClient, cookie: str) -> dict[str, Any]:
    reply = await client.get("/dashboard/api/overview?range=1h", headers={"cookie": cookie})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def test_a_revoked_key_ends_sessions_and_streams_of_both_processes_within_a_second(
    world: World, both: Both
):
    a, b = both
    url = world.apis.service.url
    body = {"scopes": ["tenant"]}
    made = (await a.post("/admin/tenants/zen/keys", json=body)).raise_for_status().json()
    cookie = await log_in(a, url, made["key"])
    begun = [asyncio.Event(), asyncio.Event()]
    streams = [
        asyncio.create_task(watched_end(world.apis, pid, cookie, event))
        for pid, event in zip(world.apis.pids(), begun, strict=True)
    ]
    async with asyncio.timeout(60):
        for event in begun:
            await event.wait()
    (await a.delete(f"/admin/tenants/zen/keys/{made['id']}")).raise_for_status()
    revoked = time.monotonic()
    async with asyncio.timeout(10):
        ends = await asyncio.gather(*streams)
    assert [reason for reason, _ in ends] == ["revoked", "revoked"]
    assert all(at - revoked < 1.0 for _, at in ends)
    for client in (a, b):
        reply = await client.get("/dashboard/api/overview", headers={"cookie": cookie})
        assert reply.status_code == 401


async def test_recorders_and_engines_come_and_go_and_nothing_written_is_lost(
    world: World, both: Both
):
    a, b = both
    apis = world.apis
    cookie = await log_in(a, apis.service.url, apis.service.admin_key)
    counted = (await overview(a, cookie))["totals"]["requests"]

    async def ask(number: int) -> None:
        nonlocal counted
        asked = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        for client in (a, b) * number:
            reply = await client.post("/t/acme/v1/completions", json=asked)
            assert reply.status_code == 200, reply.text
            counted += 1

    async def is_counted() -> bool:
        return (await overview(b, cookie))["totals"]["requests"] >= counted

    def child(module: str) -> psutil.Process:
        children = psutil.Process(apis.service.process.pid).children()
        [found] = [process for process in children if module in process.cmdline()]
        return found

    await ask(3)
    recorder = child("loraplex.recorder.process")
    os.kill(recorder.pid, signal.SIGKILL)
    await ask(3)  # while there is none
    await until(is_counted)
    assert child("loraplex.recorder.process").pid != recorder.pid
    os.kill(child("engine.process").pid, signal.SIGKILL)

    async def is_ready() -> bool:
        return (await a.get("/health/ready")).status_code == 200

    async def is_down() -> bool:
        return not await is_ready()

    await until(is_down)
    await until(is_ready)
    before = (await overview(a, cookie))["totals"]["requests"]
    assert before == counted
    await ask(2)
    await until(is_counted)
    totals = (await overview(b, cookie))["totals"]
    assert totals["requests"] == counted
    path = "/dashboard/api/adapters/acme/base?range=1h"
    view = (await b.get(path, headers={"cookie": cookie})).json()
    assert view["row"]["requests"] == counted
    assert sum(view["row"]["causes"].values()) == pytest.approx(sum(totals["causes"].values()))
