"""Ends a process whose step loop hangs, so that its supervisor can start another."""

import os
import threading
import time
from collections.abc import Callable

import structlog

HUNG_EXIT_CODE = 4


def end_when_hung(
    last_turn: Callable[[], float], hang_seconds: float, *, end: Callable[[int], object] = os._exit
) -> None:
    """Watch on a thread that `last_turn` changes at least once in `hang_seconds`.

    Seconds are counted by the watch's own pauses, so a machine that was asleep has not hung.
    """
    pause = min(1.0, hang_seconds / 4)

    def watch() -> None:
        seen, still_seconds = last_turn(), 0.0
        while still_seconds < hang_seconds:
            time.sleep(pause)
            still_seconds = still_seconds + pause if last_turn() == seen else 0.0
            seen = last_turn()
        structlog.get_logger("engine.process").error("step_hangs", seconds=hang_seconds)
        end(HUNG_EXIT_CODE)

    threading.Thread(target=watch, name="hang-watch", daemon=True).start()
