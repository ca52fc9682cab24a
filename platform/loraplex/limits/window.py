"""A sliding-window counter's state, and what follows from it.

The window before the current one counts by the part of it that lies in the last minute, as if what
it holds had come evenly (https://blog.cloudflare.com/counting-things-a-lot-of-different-things/).
"""

import math
from typing import NamedTuple

MINUTE = 60
"""Seconds of a window."""


class Window(NamedTuple):
    """Counts of two windows, and the seconds after which each is over."""

    previous: int
    previous_left: float
    """Until the previous window is out of the last minute."""
    current: int
    current_left: float
    """Until the current window is the previous one."""

    @property
    def used(self) -> float:
        """What counts of both now."""
        return self.previous * self.previous_left / MINUTE + self.current

    def remaining(self, limit: int) -> int:
        """What a limit leaves."""
        return max(0, limit - math.floor(self.used))

    def seconds_until(self, room: int) -> float:
        """How long until no more than `room` counts, if nothing comes meanwhile."""
        room = max(room, 0)
        if self.used <= room:
            return 0.0
        if self.current <= room:
            return self.previous_left - (room - self.current) * MINUTE / self.previous
        return self.current_left + MINUTE * (1 - room / self.current)
