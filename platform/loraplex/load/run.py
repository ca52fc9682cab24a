"""One run of a load test, from its calls to its figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.simulation.figures import Slo
from loraplex.load.calls import Call
from loraplex.load.client import open_client
from loraplex.load.figures import LoadFigures, after_warm_up, load_figures
from loraplex.load.loops import Sender, closed_loop, open_loop
from loraplex.load.outcome import Outcome

OnProgress = Callable[[int, str], None]
"""Is told how many calls are over, and the state in words."""


@dataclass(frozen=True, slots=True)
class Loop:
    """How calls are sent."""

    kind: Literal["open", "closed"]
    amount: float
    """Requests a second of an open loop, 0 for a trace's own times; calls under way of a closed."""

    @property
    def label(self) -> str:
        """In a word or two."""
        if self.kind == "closed":
            return f"{self.amount:g} at a time"
        return f"{self.amount:g}/s" if self.amount else "trace"


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What was sent, how, and what became of it."""

    loop: Loop
    outcomes: Sequence[Outcome]
    figures: LoadFigures

    @property
    def rate(self) -> float | None:
        """Of an open loop."""
        return self.loop.amount if self.loop.kind == "open" else None

    @property
    def concurrency(self) -> int | None:
        """Of a closed loop."""
        return int(self.loop.amount) if self.loop.kind == "closed" else None


async def run_load(
    base_url: str,
    loop: Loop,
    calls: Sequence[Call],
    *,
    key: str | None = None,
    tenant_keys: Mapping[str, str],
    silence: float | None = None,
    warm_up: float = 0.0,
    slo: Slo,
    on_progress: OnProgress = lambda done, state: None,
) -> LoadRun:
    """Send all calls and wait for their ends. A call that fails is an outcome, not an exception.

    `silence`: seconds after which a call has failed.
    """
    num_done = num_failed = 0

    def on_outcome(outcome: Outcome, num_open: int) -> None:
        nonlocal num_done, num_failed
        num_done += 1
        num_failed += not outcome.is_served
        failed = f", {num_failed} failed" if num_failed else ""
        on_progress(num_done, f"{num_open} under way{failed}")

    async with open_client(base_url, {}, silence) as http:
        sender = Sender(http, key, tenant_keys)
        if loop.kind == "open":
            outcomes = await open_loop(sender, calls, on_outcome)
        else:
            outcomes = await closed_loop(sender, calls, int(loop.amount), on_outcome)
    return LoadRun(loop, outcomes, load_figures(after_warm_up(outcomes, warm_up), slo))
