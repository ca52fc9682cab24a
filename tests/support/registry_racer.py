"""A process that registers versions of one name, and deletes now and then; see the race tests.

Prints `ready`; then, for every line it reads, makes some uploads and prints their numbers as JSON.
"""

import asyncio
import json
import random
import sys
from contextlib import suppress

from adapter_store.errors import AdapterNotFound, VersionInUse, VersionNotFound
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from tests.support.registry import FINGERPRINT, upload


async def one_round(registry: Registry, content: str, dice: random.Random) -> int:
    """Upload; then, by chance, delete the version or the whole adapter."""
    registered = await registry.register_version("acme", "raced", upload(content), FINGERPRINT)
    assert registered.created
    roll = dice.random()
    with suppress(AdapterNotFound, VersionNotFound, VersionInUse):
        if roll < 0.1:
            await registry.delete_adapter("acme", "raced")
        elif roll < 0.4:
            await registry.delete_version("acme", "raced", registered.version)
    return registered.version


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def race(url: str, seed: int, rounds: int) -> None:
    registry = Registry(Database(url))
    dice = random.Random(seed)
    try:
        await registry.list_tenants()
        say("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            heat = line.strip()
            numbers = [await one_round(registry, f"{seed}/{heat}/{i}", dice) for i in range(rounds)]
            say(json.dumps(numbers))
    finally:
        await registry.close()


if __name__ == "__main__":
    asyncio.run(race(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
