"""Many who miss the same value at once cost one read, and none gets what a change made old."""

import asyncio
from collections.abc import Callable

import pytest

from adapter_store.errors import ModelNotFound, RegistryUnavailable
from adapter_store.registry.cache import ReadThroughCache

pytestmark = pytest.mark.anyio


class Table:
    """Reads that a test lets go on, one after the other."""

    def __init__(self) -> None:
        self.value: str | None = "one"
        self.error: Exception | None = None
        self.reads: list[asyncio.Event] = []

    async def read(self) -> str | None:
        seen = self.value
        self.reads.append(asyncio.Event())
        await self.reads[-1].wait()
        if self.error is not None:
            raise self.error
        return seen

    async def until_reading(self, number: int) -> None:
        async with asyncio.timeout(5):
            while len(self.reads) < number:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0)


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def cache() -> ReadThroughCache[str]:
    return ReadThroughCache("test", str)


async def test_a_crowd_that_misses_costs_one_read(cache: ReadThroughCache[str], table: Table):
    tasks = [asyncio.create_task(cache.get("s", "k", table.read)) for _ in range(50)]
    await table.until_reading(1)
    other = asyncio.create_task(cache.get("s", "another", table.read))
    await table.until_reading(2)
    for read in table.reads:
        read.set()
    assert await asyncio.gather(*tasks, other) == ["one"] * 51
    assert len(table.reads) == 2
    assert await cache.get("s", "k", table.read) == "one" and len(table.reads) == 2


@pytest.mark.parametrize(
    "forget", [lambda c: c.forget("s"), lambda c: c.doubt(), lambda c: c.doubt("s")]
)
async def test_who_asks_after_a_change_never_joins_a_read_from_before_it(
    cache: ReadThroughCache[str], table: Table, forget: Callable[[ReadThroughCache[str]], None]
):
    early = asyncio.create_task(cache.get("s", "k", table.read))
    await table.until_reading(1)
    table.value = "two"
    forget(cache)
    late = asyncio.create_task(cache.get("s", "k", table.read))
    await table.until_reading(2)
    table.reads[0].set()
    assert await early == "one"
    later = asyncio.create_task(cache.get("s", "k", table.read))
    table.reads[1].set()
    assert await late == await later == "two"
    assert len(table.reads) == 2, "the last one joined the second read"
    assert await cache.get("s", "k", table.read) == "two"


async def test_who_is_cancelled_takes_nobody_along(cache: ReadThroughCache[str], table: Table):
    first = asyncio.create_task(cache.get("s", "k", table.read))
    await table.until_reading(1)
    second = asyncio.create_task(cache.get("s", "k", table.read))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    table.reads[0].set()
    assert await second == "one" and len(table.reads) == 1


@pytest.mark.parametrize("error", [ModelNotFound("none"), RegistryUnavailable("away")])
async def test_all_hear_of_an_error_and_the_next_one_reads_again(
    cache: ReadThroughCache[str], table: Table, error: Exception
):
    table.error = error
    tasks = [asyncio.create_task(cache.get("s", "k", table.read)) for _ in range(5)]
    await table.until_reading(1)
    table.reads[0].set()
    assert await asyncio.gather(*tasks, return_exceptions=True) == [error] * 5
    table.error = None
    again = asyncio.create_task(cache.get("s", "k", table.read))
    await table.until_reading(2)
    table.reads[1].set()
    assert await again == "one"


async def test_an_error_that_nobody_waits_for_is_no_noise(
    cache: ReadThroughCache[str], table: Table
):
    table.error = ModelNotFound("none")
    only = asyncio.create_task(cache.get("s", "k", table.read))
    await table.until_reading(1)
    only.cancel()
    await asyncio.gather(only, return_exceptions=True)
    table.reads[0].set()
    await asyncio.sleep(0.01)
    assert not cache._flights
