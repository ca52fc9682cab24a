"""Why a request waits: cumulative seconds by cause, kept for a queue and not for a request.

A queue is in exactly one state, the first that applies:

- `quota`: its tenant is at its concurrency limit;
- `load`: its adapter's weights are on their way to host memory or into a slot;
- `slot`: its adapter has no slot, or its slot is being drained for another adapter;
- `kv`, `budget`: admission stopped at its head for want of blocks, of tokens or seats;
- `turn`: all others.

Time is settled only when a state changes, so the cost is per change and not per waiting request.
What one request waited is the difference of two readings, and its parts sum exactly.
"""

from collections.abc import Sequence as SequenceOf
from typing import get_args

from engine.messages import WaitCause

CAUSES: tuple[WaitCause, ...] = get_args(WaitCause)

Reading = tuple[int, ...]
"""Nanoseconds by cause, in the order of `CAUSES`."""


class HoldClock:
    """A tenant's time in two parts: held back by its quota, and open. O(1) for all its queues."""

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
    """One queue's cumulative time by cause. While its tenant is held, only `quota` grows."""

    __slots__ = ("_hold_clock", "_settled", "_since", "cause")

    def __init__(self, hold_clock: HoldClock, cause: WaitCause, now: int) -> None:
        self.cause: WaitCause = cause
        """The state beneath the tenant's hold."""
        self._hold_clock = hold_clock
        self._settled = dict.fromkeys(CAUSES, 0)
        self._since = now - hold_clock.held(now)  # in the tenant's open time

    def change(self, cause: WaitCause, now: int) -> None:
        """Wait for another cause from now on."""
        if cause == self.cause:
            return
        open_time = now - self._hold_clock.held(now)
        self._settled[self.cause] += open_time - self._since
        self._since = open_time
        self.cause = cause

    def read(self, now: int) -> Reading:
        """Totals by cause; two readings differ by exactly the time between them."""
        held = self._hold_clock.held(now)
        totals = self._settled | {"quota": held}
        totals[self.cause] += now - held - self._since
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
