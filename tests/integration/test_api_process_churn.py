"""Changes of adapters through two API processes, without end and over their deaths."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from random import Random

import httpx
import pytest

from adapter_store.blobs import LocalBlobStore
from tests.support.api_processes import World

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Writer:
    """Uploads versions, moves an alias and deletes, over and over; keeps what was acknowledged."""

    def __init__(self, world: World, name: str, seed: int) -> None:
        self.name = name
        self.kept: dict[int, str] = {}
        """Digests of versions that must be there."""
        self.gone: set[int] = set()
        self.unsure: set[int] = set()
        """Versions that were to be deleted when the answer failed to come."""
        self._world = world
        self._random = Random(seed)

    async def run(self, stop: asyncio.Event) -> None:
        apis = self._world.apis
        headers = {"authorization": f"Bearer {apis.service.admin_key}"}
        async with httpx.AsyncClient(
            base_url=apis.service.url, headers=headers, timeout=60
        ) as client:
            while not stop.is_set():
                # Connections break; what was not acknowledged may have happened or not.
                with contextlib.suppress(httpx.TransportError):
                    await self._write(client)

    async def _write(self, client: httpx.AsyncClient) -> None:
        path = f"/t/acme/v1/adapters/{self.name}"
        reply = await self._world.upload(client, self.name, self._random.randrange(10_000))
        assert reply.status_code in (200, 201), reply.text
        uploaded = reply.json()
        if uploaded["version"] not in self.unsure:
            self.kept[uploaded["version"]] = uploaded["digest"]
        version = self._random.choice(sorted(self.kept))
        move = await client.put(f"{path}/aliases/spare", json={"version": version})
        assert move.status_code == 200, move.text
        version = self._random.choice(sorted(self.kept))
        digest = self.kept.pop(version)
        self.unsure.add(version)
        gone = await client.delete(f"{path}/versions/{version}")
        assert gone.status_code in (204, 409), gone.text
        self.unsure.remove(version)
        if gone.status_code == 204:
            self.gone.add(version)
        else:
            self.kept[version] = digest


async def test_processes_killed_at_random_points_lose_nothing_that_was_acknowledged(
    world: World, tmp_path: Path
):
    apis = world.apis
    random = Random(36)
    writers = [Writer(world, f"written-{number}", number) for number in range(4)]
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
            assert writer.kept.items() <= digests.items()
            assert not writer.gone & digests.keys()
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
        for number in range(25):
            await upload(number % 2)
            calls = [asyncio.create_task(ask(client)) for client in clients]
            await asyncio.sleep(random.uniform(0, 0.3))
            (await b.delete("/t/acme/v1/adapters/churn")).raise_for_status()
            await upload(1 - number % 2)
            seen.update(await asyncio.gather(*calls))
            (await b.delete("/t/acme/v1/adapters/churn")).raise_for_status()
        assert {*texts} <= seen
        assert seen - {*texts} <= {"model_not_found", "adapter_unavailable"}
        await apis.until_running(a, 0)
        async with asyncio.timeout(20):
            while await left() != before:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.1)
