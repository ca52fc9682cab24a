import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

import pytest

from adapter_store.errors import AdapterNotFound, AliasConflict, NameTaken
from adapter_store.registry.registry import Registry
from tests.support.registry import FINGERPRINT, open_registry, upload
from tests.support.registry_racer import one_round

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


async def check_consistency(registry: Registry, last_number: int) -> None:
    """What the registry holds is whole, and counting goes on after the last number."""
    try:
        adapter = await registry.get_adapter("acme", "raced")
        versions = await registry.list_versions("acme", "raced")
    except AdapterNotFound:
        pass
    else:
        numbers = [v.version for v in versions]
        assert numbers == sorted(set(numbers), reverse=True)
        assert adapter.num_versions == len(numbers)
        assert set(adapter.aliases.values()) <= set(numbers)
        assert all(v.digest == v.report["digest"] for v in versions)
    made = await registry.register_version("acme", "raced", upload("last"), FINGERPRINT)
    assert made.version == last_number + 1


async def test_parallel_uploads_of_one_name_get_a_number_each(registry_url: str):
    async with open_registry(registry_url) as registry:
        dice = random.Random(7)
        numbers = await asyncio.gather(
            *(one_round(registry, f"content {i}", dice) for i in range(50))
        )
        assert sorted(numbers) == list(range(1, 51))
        await check_consistency(registry, 50)


async def test_parallel_uploads_of_the_same_files_are_one_version(registry_url: str):
    async with open_registry(registry_url) as registry:
        made = await asyncio.gather(
            *(
                registry.register_version("acme", "raced", upload("same"), FINGERPRINT)
                for _ in range(20)
            )
        )
        assert {m.version for m in made} == {1}
        assert [m.created for m in made].count(True) == 1


async def test_of_parallel_guarded_moves_one_wins(registry_url: str):
    async with open_registry(registry_url) as registry:
        for content in ("1", "2", "3"):
            await registry.register_version("acme", "raced", upload(content), FINGERPRINT)
        results = await asyncio.gather(
            *(
                registry.set_alias("acme", "raced", "default", version, expect=3)
                for version in (1, 2, 1, 2)
            ),
            return_exceptions=True,
        )
        assert [type(r) for r in results].count(AliasConflict) == 3


async def test_of_parallel_tenants_of_one_name_one_is_made(registry_url: str):
    async with open_registry(registry_url) as registry:
        results = await asyncio.gather(
            *(registry.create_tenant("blue") for _ in range(10)), return_exceptions=True
        )
        assert [type(r) for r in results].count(NameTaken) == 9


def race_processes(url: str, heats: int, rounds: int) -> list[list[int]]:
    """Two processes start each heat together; their numbers, heat after heat."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.support.registry_racer"]  # noqa: RUF005
            + [url, str(seed), str(rounds)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    numbers: list[list[int]] = [[] for _ in racers]
    pipes = [(cast(IO[str], racer.stdin), cast(IO[str], racer.stdout)) for racer in racers]
    for _, output in pipes:
        assert output.readline() == "ready\n"
    for heat in range(heats):
        for start, _ in pipes:
            start.write(f"{heat}\n")
            start.flush()
        for given, (_, output) in zip(numbers, pipes, strict=True):
            given.extend(json.loads(output.readline()))
    for racer in racers:
        racer.communicate(timeout=60)
    assert [racer.returncode for racer in racers] == [0, 0]
    return numbers


async def test_two_processes_never_share_a_number(registry_url: str):
    async with open_registry(registry_url) as registry:
        first, second = await asyncio.to_thread(race_processes, registry_url, 10, 5)
        assert sorted(first + second) == list(range(1, 101))
        assert first[0] < second[-1] and second[0] < first[-1]  # they did take turns
        await check_consistency(registry, 100)


async def test_a_process_killed_before_its_commit_leaves_no_row(registry_url: str):
    async with open_registry(registry_url) as registry:
        code = (
            "import asyncio, os, sys\n"
            "from adapter_store.registry.session import Database\n"
            "from adapter_store.registry.models import Tenant\n"
            "from datetime import datetime, UTC\n"
            "async def work(session):\n"
            "    session.add(Tenant(name='ghost', weight=1.0, created_at=datetime.now(UTC)))\n"
            "    await session.flush()\n"
            "    os._exit(9)\n"
            "asyncio.run(Database(sys.argv[1]).write(work))\n"
        )
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", code, registry_url],
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 9
        assert "ghost" not in [t.name for t in await registry.list_tenants()]
        await registry.create_tenant("ghost")  # and no lock stays behind


async def test_uploads_to_a_fresh_name_from_two_registries_both_count(registry_url: str):
    async with open_registry(registry_url) as one, open_registry(registry_url) as two:
        made = await asyncio.gather(
            *(
                registry.register_version("acme", "raced", upload(f"{i}"), FINGERPRINT)
                for i, registry in enumerate([one, two] * 10)
            )
        )
        assert sorted(m.version for m in made) == list(range(1, 21))
