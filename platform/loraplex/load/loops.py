"""Open and closed loops: who sends the next call, and when.

An open loop sends at the times of its calls, whatever became of the others, as a crowd of clients
does; latencies count from when a call was due, so that a late sender hides nothing ("coordinated
omission": Tene, "How NOT to Measure Latency", 2013). A closed loop keeps a number of calls under
way; there a call is due when it is sent, so that its latencies say nothing of a queue outside.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import httpx

from loraplex.load.calls import Call
from loraplex.load.client import stream
from loraplex.load.outcome import Outcome

OnOutcome = Callable[[Outcome, int], None]
"""Is told of a call that is over, and how many are under way."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Where calls go, and with which keys."""

    http: httpx.AsyncClient
    key: str | None
    tenant_keys: Mapping[str, str]
    """For tenants that have a key of their own."""

    async def send(self, call: Call, due: float | None, now: Callable[[], float]) -> Outcome:
        """One call; due now, if nothing else is said."""
        key = self.tenant_keys.get(call.tenant, self.key)
        return await stream(self.http, call, key=key, due=now() if due is None else due, now=now)


def _ignore(outcome: Outcome, num_open: int) -> None:
    """Nobody wants to know."""


async def open_loop(
    sender: Sender, calls: Iterable[Call], on_outcome: OnOutcome = _ignore
) -> list[Outcome]:
    """Send each call at its time; the outcomes in the order of the calls."""
    now = _clock()
    tasks: list[asyncio.Task[Outcome]] = []
    num_open = 0

    async def one(call: Call) -> Outcome:
        nonlocal num_open
        num_open += 1
        outcome = await sender.send(call, call.at, now)
        num_open -= 1
        on_outcome(outcome, num_open)
        return outcome

    async with asyncio.TaskGroup() as group:
        for call in calls:
            if (early := call.at - now()) > 0:
                await asyncio.sleep(early)
            tasks.append(group.create_task(one(call)))
    return [task.result() for task in tasks]


async def closed_loop(
    sender: Sender, calls: Iterable[Call], concurrency: int, on_outcome: OnOutcome = _ignore
) -> list[Outcome]:
    """Keep `concurrency` calls under way until all are sent; outcomes as they end."""
    now = _clock()
    waiting = iter(calls)
    outcomes: list[Outcome] = []

    async def worker() -> None:
        for call in waiting:
            outcomes.append(await sender.send(call, None, now))
            on_outcome(outcomes[-1], concurrency)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return outcomes


def _clock() -> Callable[[], float]:
    began = time.perf_counter()
    return lambda: time.perf_counter() - began
