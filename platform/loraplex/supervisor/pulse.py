"""Signs of life: a pipe on which a child's event loop writes a byte now and then.

A process that is frozen, or whose loop hangs, still holds its connections and keeps the kernel from
refusing them; only its silence tells.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

BEAT_SECONDS = 0.5
_LOOKS = 4
"""Silence is found in so many looks: after a machine or container was frozen only one of them is
due, and the child has the time of the others to be heard again."""


class Pulse:
    """A context manager around one life of a child.

    Calls `on_silence` when, after the first sign of life, none came for `silence_seconds`. Until
    then a child may take as long as it needs to start. `child_fd` is the descriptor to beat on.
    """

    def __init__(self, silence_seconds: float, on_silence: Callable[[], None]) -> None:
        self._silence_seconds = silence_seconds
        self._on_silence = on_silence
        self._timer: asyncio.TimerHandle | None = None
        self._num_looks = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._read_fd, self.child_fd = os.pipe()
        self._is_handed_over = False
        os.set_blocking(self._read_fd, False)
        self._loop.add_reader(self._read_fd, self._read)
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.hand_over()
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)

    def hand_over(self) -> None:
        """The child has its descriptor: let go of ours, so that its end can be seen."""
        if not self._is_handed_over:
            self._is_handed_over = True
            os.close(self.child_fd)

    def _read(self) -> None:
        # Before a timer that is due as well: were we ourselves asleep, the child is not to blame.
        beats = os.read(self._read_fd, 4096)
        if self._timer is not None:
            self._timer.cancel()
        if beats:
            self._num_looks = 0
            self._look_later()
        else:
            self._loop.remove_reader(self._read_fd)

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(self._silence_seconds / _LOOKS, self._look)

    def _look(self) -> None:
        self._num_looks += 1
        if self._num_looks == _LOOKS:
            self._on_silence()
        else:
            self._look_later()


async def beat(child_fd: int) -> None:
    """Give signs of life for as long as the event loop turns; the child's side."""
    os.set_blocking(child_fd, False)
    while True:
        # The supervisor may sleep, and have enough to read; or be gone, as we will be.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(child_fd, b".")
        await asyncio.sleep(BEAT_SECONDS)
