"""Why requests wait: cumulative time by cause, kept for each queue and not for each request.

A queue is in exactly one state, the first that applies:

- `quota`: its tenant is at its limit of sequences, or of slots while its adapter holds none;
- `load`: its adapter's weights are on their way to host memory or into a slot;
- `slot`: its adapter has no slot, or its slot is being drained for another adapter;
- `kv`: admission stopped at its head for want of blocks;
- `budget`: admission stopped at its head for want of tokens or seats;
- `turn`: none of these; others go first.

Time is settled only when a state changes, so the cost is per change and not per waiting request.
What one request waited is the difference of two readings, whose parts sum exactly to the whole.
"""

from collections.abc import Sequence as SequenceOf
from typing import Literal, get_args

WaitCause = Literal["quota", "load", "slot", "kv", "budget", "turn"]
CAUSES: tuple[WaitCause, ...] = get_args(WaitCause)

Reading = tuple[int, ...]
"""Nanoseconds by cause, in the order of `CAUSES`."""


class HoldClock:
    """How long a tenant's quota has held it back; one clock serves all its queues, so O(1)."""

    __slots__ = ("_held", "_since", "is_held")

    def __init__(self, now: int) -> None:
        self.is_held = False
        self._held = 0
        self._since = now

    def held(self, now: int) -> int:
        """Nanoseconds held back so far."""
        return self._held + (now - self._since if self.is_held else 0)

    def turn(self, is_held: bool, now: int) -> None:
        """Hold back, or open, from now on."""
        self._held = self.held(now)
        self._since = now
        self.is_held = is_held


class WaitLedger:
    """One queue's cumulative time by cause. While its clock is held, only `quota` grows."""

    __slots__ = ("_clock", "_held", "_settled", "_since", "cause")

    def __init__(self, clock: HoldClock, cause: WaitCause, now: int) -> None:
        self.cause: WaitCause = cause
        """What it waits for apart from the quota of its clock."""
        self._clock = clock
        self._settled = dict.fromkeys(CAUSES, 0)
        self._since = now
        self._held = clock.held(now)

    @property
    def is_held(self) -> bool:
        """Whether a quota holds the queue back now."""
        return self._clock.is_held

    def change(self, cause: WaitCause, now: int, clock: HoldClock | None = None) -> None:
        """Wait for another cause from now on; `clock` replaces the quota's clock if given."""
        clock = clock or self._clock
        if cause == self.cause and clock is self._clock:
            return
        held = self._clock.held(now) - self._held
        self._settled["quota"] += held
        self._settled[self.cause] += now - self._since - held
        self._since = now
        self._clock = clock
        self._held = clock.held(now)
        self.cause = cause

    def read(self, now: int) -> Reading:
        """Totals by cause; two readings differ by exactly the time between them."""
        held = self._clock.held(now) - self._held
        totals = dict(self._settled)
        totals["quota"] += held
        totals[self.cause] += now - self._since - held
        return tuple(totals.values())


def add_wait(total: list[int], begin: Reading, end: Reading) -> None:
    """Add the time between two readings of a ledger to `total`, in the order of `CAUSES`."""
    for index, (before, after) in enumerate(zip(begin, end, strict=True)):
        total[index] += after - before


def seconds_by_cause(total: SequenceOf[int]) -> dict[str, float]:
    """A request's queue time in seconds, causes without any left out."""
    return {
        cause: nanoseconds / 1e9
        for cause, nanoseconds in zip(CAUSES, total, strict=True)
        if nanoseconds
    }
