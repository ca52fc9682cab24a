"""The watch beats while the loop comes round, and ends what does not."""

import os
import threading
from collections.abc import Iterator

import pytest

from engine.hang_watch import HUNG_EXIT_CODE, end_when_hung


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


class Loop:
    """Comes round so many times."""

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns
        self.code: int | None = None
        self._turn = 0
        self._ended = threading.Event()

    def last_turn(self) -> float:
        self._turn = min(self._turn + 1, self.num_turns)
        return self._turn

    def end(self, code: int) -> None:
        self.code = code
        self._ended.set()

    def wait(self) -> None:
        assert self._ended.wait(20)


def test_beats_come_as_long_as_the_loop_does_and_then_it_is_ended(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    loop = Loop(7)  # the watch asks twice a round
    end_when_hung(loop.last_turn, 0.04, beat_fd=writer, end=loop.end)
    loop.wait()
    assert loop.code == HUNG_EXIT_CODE
    assert os.read(reader, 100) == b"." * 4


def test_a_pipe_that_nobody_reads_stops_no_watch(pipe: tuple[int, int]) -> None:
    _, writer = pipe
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    loop = Loop(7)
    end_when_hung(loop.last_turn, 0.04, beat_fd=writer, end=loop.end)
    loop.wait()
    assert loop.code == HUNG_EXIT_CODE
