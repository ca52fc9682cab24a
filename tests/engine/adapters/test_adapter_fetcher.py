"""Fetches on behalf of the engine: one a digest, a few at a time, none for ever."""

import asyncio

import pytest

from engine.adapters.fetcher import MAX_FETCHES, AdapterFetcher
from engine.messages import FetchFailed, Have

pytestmark = pytest.mark.anyio


async def answers_of(answers: "asyncio.Queue[Have | FetchFailed]", count: int) -> list[object]:
    async with asyncio.timeout(10):
        return [await answers.get() for _ in range(count)]


async def test_a_fetch_that_hangs_fails_in_time_and_gives_its_turn_to_others() -> None:
    answers: asyncio.Queue[Have | FetchFailed] = asyncio.Queue()

    async def fetch(digest: str) -> None:
        if digest.startswith("hangs"):
            await asyncio.Event().wait()

    fetcher = AdapterFetcher(fetch, answers.put_nowait, patience=0.05)
    hanging = [f"hangs-{number}" for number in range(MAX_FETCHES)]
    for digest in [*hanging, "good"]:
        fetcher.start(digest)
    answered = await answers_of(answers, MAX_FETCHES + 1)
    failed = [answer for answer in answered if isinstance(answer, FetchFailed)]
    assert [answer.digest for answer in failed] == hanging
    assert all("0.05 s" in answer.reason for answer in failed)
    assert Have("good") in answered
    await fetcher.close()


async def test_one_fetch_answers_all_who_ask_meanwhile_and_the_next_one_starts_anew() -> None:
    answers: asyncio.Queue[Have | FetchFailed] = asyncio.Queue()
    release = asyncio.Event()
    fetched: list[str] = []

    async def fetch(digest: str) -> None:
        fetched.append(digest)
        await release.wait()
        if len(fetched) == 2:
            raise OSError("no such blob")

    fetcher = AdapterFetcher(fetch, answers.put_nowait)
    for _ in range(100):
        fetcher.start("a")
    await asyncio.sleep(0)
    release.set()
    assert await answers_of(answers, 1) == [Have("a")]
    await asyncio.sleep(0)
    fetcher.start("a")
    assert await answers_of(answers, 1) == [FetchFailed("a", "no such blob")]
    assert fetched == ["a", "a"] and answers.empty()
    await fetcher.close()
