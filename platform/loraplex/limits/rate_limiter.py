"""Requests and tokens a minute: taken before a call is queued, settled when it is over."""

import asyncio
import math
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from adapter_store.registry.records import TenantInfo
from loraplex.errors import ApiError
from loraplex.limits.shared_rates import Charge, SharedRates
from loraplex.limits.window import MINUTE

_CODES = {"requests": "request_rate_exceeded", "tokens": "token_rate_exceeded"}


class RateLimiter:
    """An async context manager; leaving it waits for what is still being given back."""

    def __init__(self, rates: SharedRates) -> None:
        self._rates = rates
        self._settling: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._settling)

    async def admit(self, tenant: TenantInfo) -> "Admission":
        """Count one request, before any work is done for it. Raises `ApiError`: 429 with
        `retry-after` where the minute's are used up.
        """
        admission = Admission(self)
        if (limit := tenant.quota.requests_per_minute) is not None:
            await self._take(admission, tenant, "requests", limit, 1)
        return admission

    async def reserve(self, admission: "Admission", tenant: TenantInfo, num_tokens: int) -> None:
        """Reserve the most tokens that an admitted request can use, its prompt included.

        Raises `ApiError`, and then the request counts no more: 429 with `retry-after` where the
        minute's are used up, 400 where no minute would have enough.
        """
        if (limit := tenant.quota.tokens_per_minute) is None:
            return
        if num_tokens > limit:
            admission.cancel()
            raise ApiError(
                400, "token_rate_too_small",
                f"this request may use {num_tokens} tokens, its prompt included; the tenant "
                f"has {limit} a minute: ask for fewer with max_tokens",
                param="max_tokens",
            )  # fmt: skip
        await self._take(admission, tenant, "tokens", limit, num_tokens)

    async def _take(
        self, admission: "Admission", tenant: TenantInfo, kind: str, limit: int, amount: int
    ) -> None:
        charge = await self._rates.take(f"{tenant.name}/{kind}", limit, amount)
        admission.note(kind, limit, charge)
        if not charge.is_granted:
            admission.cancel()
            raise _refusal(kind, limit, charge, admission.headers)

    async def admit_aside(self, tenant: TenantInfo) -> dict[str, str]:
        """Count a call that generates nothing, apart: it takes no generation's place, and there may
        be as many a minute. Returns the reply's `x-ratelimit-*`.

        Raises `ApiError`: 429 with `retry-after` where the minute's are used up.
        """
        if (limit := tenant.quota.requests_per_minute) is None:
            return {}
        charge = await self._rates.take(f"{tenant.name}/aside", limit, 1)
        headers = _headers("requests", limit, charge)
        if not charge.is_granted:
            raise _refusal("requests", limit, charge, headers, told="requests besides generation")
        return headers

    def give_back(self, charge: Charge, amount: int) -> None:
        """Uncount part of a charge; synchronous, so that it works while a task is cancelled."""
        if amount > 0:
            self._in_background(self._rates.give_back(charge, amount))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)


class Admission:
    """What a call has reserved. `settle` or `cancel` it once; a second time does nothing."""

    def __init__(self, limiter: RateLimiter) -> None:
        self.headers: dict[str, str] = {}
        """`x-ratelimit-*`, as OpenAI's: for each rate that the tenant's quota has."""
        self._limiter = limiter
        self._charges: dict[str, Charge] = {}

    def note(self, kind: str, limit: int, charge: Charge) -> None:
        """Take in the outcome for one rate."""
        self.headers |= _headers(kind, limit, charge)
        if charge.is_granted:
            self._charges[kind] = charge

    def settle(self, num_tokens: int) -> None:
        """The call is over and has used so many tokens: give back the others."""
        charges, self._charges = self._charges, {}
        if (tokens := charges.get("tokens")) is not None:
            self._limiter.give_back(tokens, tokens.amount - num_tokens)

    def cancel(self) -> None:
        """The call was never queued: give back all."""
        charges, self._charges = self._charges, {}
        for charge in charges.values():
            self._limiter.give_back(charge, charge.amount)


def duration(seconds: float) -> str:
    """A time as OpenAI's headers have it: `250ms`, `12s`, `1m30s`."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _headers(kind: str, limit: int, charge: Charge) -> dict[str, str]:
    window = charge.window
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(window.remaining(charge.limit)),
        f"x-ratelimit-reset-{kind}": duration(window.seconds_until(0)),
    }


def _refusal(
    kind: str, limit: int, charge: Charge, headers: dict[str, str], told: str | None = None
) -> ApiError:
    wait = min(charge.window.seconds_until(charge.limit - charge.amount), 2.0 * MINUTE)
    return ApiError(
        429, _CODES[kind],
        f"the tenant's {limit} {told or kind} a minute are used up, or nearly so; try again later",
        headers=headers | {"retry-after": str(max(1, math.ceil(wait)))},
    )  # fmt: skip
