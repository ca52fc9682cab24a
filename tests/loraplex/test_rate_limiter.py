"""Rates: no more than the limit passes, and what was not used is given back."""

import asyncio
import math
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import limits.aio.storage.memory
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits.aio.storage import MemoryStorage

from adapter_store.registry.records import Quota, TenantInfo
from loraplex.errors import ApiError
from loraplex.limits.rate_counter import RateCounter
from loraplex.limits.rate_limiter import Admission, RateLimiter, duration
from loraplex.limits.shared_rates import SharedRates, open_rates
from loraplex.limits.window import MINUTE, Window
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.anyio

BEGIN = 1_800_000_000.0
"""When a window of the memory begins."""


class Clock:
    def __init__(self) -> None:
        self.now = BEGIN

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    monkeypatch.setattr(limits.aio.storage.memory, "time", SimpleNamespace(time=ticking))
    return ticking


@pytest.fixture
def rates(clock: Clock) -> SharedRates:
    return SharedRates(local=RateCounter(MemoryStorage(), clock))


def tenant(requests: int | None = None, tokens: int | None = None, name: str = "acme"):
    quota = Quota(requests_per_minute=requests, tokens_per_minute=tokens)
    return TenantInfo(name, 1.0, datetime.now(UTC), quota=quota)


async def admit(limiter: RateLimiter, who: TenantInfo, num_tokens: int) -> Admission:
    """As a call that is queued."""
    admission = await limiter.admit(who)
    await limiter.reserve(admission, who, num_tokens)
    return admission


async def refusal(limiter: RateLimiter, who: TenantInfo, num_tokens: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await admit(limiter, who, num_tokens)
    return caught.value


async def test_no_more_than_the_limit_passes_and_the_rest_is_told_when_to_come(rates, clock):
    async with RateLimiter(rates) as limiter:
        outcomes = await asyncio.gather(
            *(admit(limiter, tenant(requests=5), 1) for _ in range(20)), return_exceptions=True
        )
        refused = [o for o in outcomes if isinstance(o, ApiError)]
        assert len(refused) == 15
        assert {(e.status, e.code) for e in refused} == {(429, "request_rate_exceeded")}
        await admit(limiter, tenant(requests=5, name="zen"), 1)
        # After the window ends, the fifth of it has to fade that makes room for one.
        wait = int(refused[0].headers["retry-after"])
        assert wait == MINUTE + MINUTE // 5
        clock.now += MINUTE - 1
        assert (await refusal(limiter, tenant(requests=5))).code == "request_rate_exceeded"
        clock.now += wait - (MINUTE - 1)
        await admit(limiter, tenant(requests=5), 1)


async def test_tokens_are_reserved_and_what_was_not_used_is_given_back(rates):
    async with RateLimiter(rates) as limiter:
        who = tenant(requests=100, tokens=1000)
        first = await admit(limiter, who, 600)
        assert first.headers["x-ratelimit-remaining-tokens"] == "400"
        refused = await refusal(limiter, who, 500)
        assert (refused.status, refused.code) == (429, "token_rate_exceeded")
        assert refused.headers["x-ratelimit-remaining-tokens"] == "400"
        first.settle(50)
        first.settle(0)
        first.cancel()
    async with RateLimiter(rates) as limiter:
        second = await admit(limiter, who, 950)
        assert second.headers["x-ratelimit-remaining-tokens"] == "0"
        # The refused request was given back as well.
        assert second.headers["x-ratelimit-remaining-requests"] == "98"
        second.cancel()
    async with RateLimiter(rates) as limiter:
        third = await admit(limiter, who, 1)
        assert third.headers["x-ratelimit-remaining-tokens"] == "949"
        assert third.headers["x-ratelimit-remaining-requests"] == "98"


@pytest.mark.parametrize("later", [59.0, 61.0, 90.0, 119.0])
async def test_what_is_given_back_counts_no_more_and_nothing_else_is(rates, clock, later):
    async with RateLimiter(rates) as limiter:
        who = tenant(tokens=1000)
        long = await admit(limiter, who, 800)
        await admit(limiter, who, 100)
        clock.now = BEGIN + later
        long.settle(100)
    async with RateLimiter(rates) as limiter:
        left = MINUTE - max(0.0, later - MINUTE)
        used = math.floor(200 * left / MINUTE)
        assert (await admit(limiter, who, 1000 - used)).headers[
            "x-ratelimit-remaining-tokens"
        ] == "0"


async def test_what_comes_back_after_its_window_has_gone_gives_nothing_extra(rates, clock):
    async with RateLimiter(rates) as limiter:
        who = tenant(tokens=1000)
        long = await admit(limiter, who, 800)
        clock.now += 2 * MINUTE
        await admit(limiter, who, 1000)
        long.settle(0)
    async with RateLimiter(rates) as limiter:
        assert (await refusal(limiter, who)).code == "token_rate_exceeded"


async def test_a_request_that_no_minute_has_room_for_is_told_so(rates):
    async with RateLimiter(rates) as limiter:
        refused = await refusal(limiter, tenant(requests=1, tokens=100), 101)
        assert (refused.status, refused.code, refused.param) == (
            400, "token_rate_too_small", "max_tokens",
        )  # fmt: skip
    async with RateLimiter(rates) as limiter:
        await admit(limiter, tenant(requests=1, tokens=100), 100)


async def test_a_tenant_without_rates_has_no_headers_and_no_limit(rates):
    async with RateLimiter(rates) as limiter:
        for _ in range(50):
            assert (await admit(limiter, tenant(), 10**9)).headers == {}


async def test_what_generates_nothing_is_counted_apart_up_to_the_same_limit(rates, clock):
    async with RateLimiter(rates) as limiter:
        who = tenant(requests=2, tokens=10)
        told = [(await limiter.admit_aside(who))["x-ratelimit-remaining-requests"] for _ in "ab"]
        assert told == ["1", "0"]
        with pytest.raises(ApiError) as refused:
            await limiter.admit_aside(who)
        assert (refused.value.status, refused.value.code) == (429, "request_rate_exceeded")
        assert "besides generation" in refused.value.message
        assert int(refused.value.headers["retry-after"]) == MINUTE + MINUTE // 2
        assert refused.value.headers["x-ratelimit-limit-requests"] == "2"
        for _ in "ab":  # no call's place is taken, and no other tenant's
            await admit(limiter, who, 1)
        await limiter.admit_aside(tenant(requests=2, name="zen"))
        clock.now += MINUTE + MINUTE // 2
        await limiter.admit_aside(who)
        assert await limiter.admit_aside(tenant()) == {}


async def test_processes_share_one_limit_over_redis_and_their_restarts(redis_server: RedisServer):
    who = tenant(requests=10, tokens=1000)
    passed = 0
    for _ in range(2):  # as processes that start, serve and end
        async with opened(redis_server) as one, opened(redis_server) as other:
            outcomes = await asyncio.gather(
                *(admit(limiter, who, 10) for limiter in (one, other) for _ in range(8)),
                return_exceptions=True,
            )
            admitted = [o for o in outcomes if not isinstance(o, BaseException)]
            assert all(isinstance(o, ApiError) for o in outcomes if o not in admitted)
            passed += len(admitted)
            for admission in admitted:
                admission.settle(4)
    assert passed == 10
    async with opened(redis_server) as limiter:
        admission = await admit(limiter, tenant(tokens=1000), 1)
        assert admission.headers["x-ratelimit-remaining-tokens"] == str(1000 - 10 * 4 - 1)


async def test_without_redis_each_process_has_its_part_and_nobody_waits(redis_server: RedisServer):
    who = tenant(requests=9)
    async with opened(redis_server) as limiter:
        kept = await admit(limiter, who, 1)
        redis_server.stop()
        for _ in range(3):
            await admit(limiter, who, 1)
        assert (await refusal(limiter, who)).code == "request_rate_exceeded"
        kept.cancel()
    redis_server.start()
    async with opened(redis_server) as limiter:
        await admit(limiter, who, 1)


async def test_a_redis_known_to_be_away_is_not_asked(redis_server: RedisServer):
    async with opened(redis_server, is_away=lambda: True) as limiter:
        await admit(limiter, tenant(requests=9), 1)
    assert redis_server.names() == []


class opened:
    def __init__(self, server: RedisServer, is_away: Callable[[], bool] = lambda: False) -> None:
        self._rates = open_rates(server.url, "test", lambda: 3, is_away)

    async def __aenter__(self) -> RateLimiter:
        self._limiter = RateLimiter(await self._rates.__aenter__())
        return self._limiter

    async def __aexit__(self, *exc: Any) -> None:
        await self._limiter.__aexit__(None, None, None)
        await self._rates.__aexit__(None, None, None)


windows = st.builds(
    Window, st.integers(0, 10**6), st.floats(0, MINUTE), st.integers(0, 10**6), st.floats(0, MINUTE)
)


@given(windows, st.integers(0, 10**6))
def test_the_wait_is_just_as_long_as_it_takes(window: Window, room: int):
    def used_after(seconds: float) -> float:
        previous = window.previous * max(0.0, window.previous_left - seconds) / MINUTE
        if seconds < window.current_left:
            return previous + window.current
        share = 1 - (seconds - window.current_left) / MINUTE
        return window.current * max(0.0, share)

    wait = window.seconds_until(room)
    if window.previous_left > window.current_left:
        return  # a previous window that outlives the current one is no state of a counter
    assert used_after(wait + 1e-6) <= room + 1e-3 * (1 + room)
    if wait > 1e-3:
        assert used_after(wait * 0.99 - 1e-6) > room - 1e-3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.25, "250ms"), (1, "1s"), (59.2, "1m0s"), (90, "1m30s")],
)
def test_durations_are_openais(seconds: float, text: str):
    assert duration(seconds) == text
