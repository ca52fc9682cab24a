"""Ends a process whose step loop hangs, so that its supervisor can start another."""

import os
import threading
import time
from collections.abc import Callable

import structlog

HUNG_EXIT_CODE = 4


def end_when_hung(
    last_turn: Callable[[], float],
    hang_seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    end: Callable[[int], object] = os._exit,
) -> None:
    """Watch on a thread that `last_turn`, by `clock`, is never older than `hang_seconds`.

    Not more often than needed: half of `hang_seconds` between looks, a second at most.
    """

    def watch() -> None:
        while clock() - last_turn() <= hang_seconds:
            time.sleep(min(1.0, hang_seconds / 2))
        structlog.get_logger("engine.process").error("step_hangs", seconds=hang_seconds)
        end(HUNG_EXIT_CODE)

    threading.Thread(target=watch, name="hang-watch", daemon=True).start()
