"""Ends a process whose step loop hangs, so that its supervisor can start another.

A thread does it. If the process is stopped, or native code never releases the interpreter, that
thread cannot run; then the beats stop too, and the supervisor ends the process.
"""

import contextlib
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
    beat_fd: int | None = None,
    end: Callable[[int], object] = os._exit,
) -> None:
    """Start a thread that ends the process when `last_turn` does not change for `hang_seconds`.

    While it changes, a byte is written to the pipe `beat_fd`, at most once a second. Time is
    counted in the thread's own pauses, so that a machine that was asleep has not hung.
    """
    pause = min(1.0, hang_seconds / 4)
    if beat_fd is not None:
        os.set_blocking(beat_fd, False)

    def watch() -> None:
        seen, still_seconds = last_turn(), 0.0
        _beat(beat_fd)
        while still_seconds < hang_seconds:
            time.sleep(pause)
            if last_turn() == seen:
                still_seconds += pause
            else:
                seen, still_seconds = last_turn(), 0.0
                _beat(beat_fd)
        structlog.get_logger("engine.process").error("step_hangs", seconds=hang_seconds)
        end(HUNG_EXIT_CODE)

    threading.Thread(target=watch, name="hang-watch", daemon=True).start()


def _beat(beat_fd: int | None) -> None:
    if beat_fd is not None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # unread, or nobody to read
            os.write(beat_fd, b".")
