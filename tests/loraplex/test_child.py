"""A supervised child: restarted when it dies, never after it was told to stop."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from loraplex.supervisor.child import Backoff, Child, ChildCannotStart
from loraplex.supervisor.pulse import Pulse
from tests.support.waiting import SECONDS

pytestmark = pytest.mark.anyio

# Appends what it read to a file, then does what the document says.
SCRIPT = """
import pathlib, signal, sys
document = sys.stdin.read()
with open(sys.argv[1], "a") as log:
    log.write(document + "\\n")
generation, action = document.split()
if action == "refuse":
    sys.exit(2)
if action == "crash" and int(generation) < 3:
    sys.exit(7)
signal.pause()
"""


def child(tmp_path: Path, action: str) -> tuple[Child, Path]:
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-c", SCRIPT, str(log)]
    return Child("test", command, lambda generation: f"{generation} {action}".encode()), log


async def until(log: Path, lines: int) -> None:
    """Wait until the child has written so many lines."""
    await asyncio.to_thread(_poll, log, lines)


def _poll(log: Path, lines: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len(log.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_child_that_dies_is_started_again_with_the_next_generation(tmp_path: Path):
    subject, log = child(tmp_path, "crash")
    task = asyncio.create_task(subject.run())
    await until(log, 3)
    subject.signal_stop()
    await asyncio.wait_for(task, SECONDS)
    assert log.read_text().split("\n")[:3] == ["1 crash", "2 crash", "3 crash"]
    assert subject.generation == 3


async def test_a_child_that_refuses_its_settings_is_not_started_again(tmp_path: Path):
    subject, log = child(tmp_path, "refuse")
    with pytest.raises(ChildCannotStart, match="test"):
        await asyncio.wait_for(subject.run(), SECONDS)
    assert log.read_text() == "1 refuse\n"


async def test_a_stop_during_the_pause_before_a_restart_ends_at_once(tmp_path: Path):
    subject, log = child(tmp_path, "crash")
    task = asyncio.create_task(subject.run())
    await until(log, 1)
    subject.signal_stop()
    await asyncio.wait_for(task, SECONDS)
    assert subject.generation <= 2


async def test_kill_ends_a_child_that_ignores_everything(tmp_path: Path):
    subject, log = child(tmp_path, "stay")
    task = asyncio.create_task(subject.run())
    await until(log, 1)
    subject.kill()
    await asyncio.wait_for(task, SECONDS)


# Beats until it has started twice; the first life is frozen after that, the second goes on.
BEATING = """
import asyncio, sys
from loraplex.supervisor.pulse import beat
generation = sys.stdin.read()
with open(sys.argv[1], "a") as log:
    log.write(generation + "\\n")
async def main():
    beats = asyncio.create_task(beat(int(sys.argv[2])))
    await asyncio.sleep(0)
    if generation == "1":
        import time; time.sleep(600)
    await beats
asyncio.run(main())
"""


async def test_a_child_whose_loop_stands_still_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "platform"))
    log = tmp_path / "log"
    log.touch()
    subject = Child(
        "test", [sys.executable, "-c", BEATING, str(log)], lambda n: str(n).encode(),
        silence_seconds=1.5,
    )  # fmt: skip
    task = asyncio.create_task(subject.run())
    await until(log, 2)
    second = subject.pid
    await asyncio.sleep(3)  # two limits: a child that beats lives on
    assert (subject.pid, log.read_text()) == (second, "1\n2\n")
    subject.signal_stop()
    await asyncio.wait_for(task, SECONDS)


async def test_a_child_that_was_never_heard_may_take_its_time_to_start(tmp_path: Path):
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-c", SCRIPT, str(log)]
    subject = Child("test", command, lambda n: f"{n} stay".encode(), silence_seconds=0.1)
    task = asyncio.create_task(subject.run())
    await until(log, 1)
    await asyncio.sleep(0.5)
    assert not task.done() and subject.generation == 1
    subject.signal_stop()
    await asyncio.wait_for(task, SECONDS)


async def test_a_freeze_of_the_whole_machine_is_not_held_against_the_child():
    silent = asyncio.Event()
    with Pulse(0.4, silent.set) as pulse:
        os.write(pulse.child_fd, b".")
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # it was heard
        time.sleep(0.5)  # noqa: ASYNC251 - we stand still as well, for longer than a child may
        for _ in range(3):
            await asyncio.sleep(0)
        assert not silent.is_set()
        os.write(pulse.child_fd, b".")
        await asyncio.wait_for(silent.wait(), SECONDS)


def test_the_pause_doubles_up_to_a_limit_and_starts_over_after_a_long_life():
    backoff = Backoff(first=0.2, longest=1.0, long_life=60)
    assert [backoff.after(0.1) for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.after(61) == 0.2
