"""One child process that is kept alive: spawned, watched, restarted with a growing pause."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from loraplex.supervisor.pulse import Pulse

CONFIG_ERROR_EXIT_CODE = 2
"""A child that exits with this can never start as configured: restarting would not help."""

_log = structlog.get_logger("loraplex.supervisor")


class ChildCannotStart(Exception):
    """A child refused its configuration; it said why on standard error."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the {name} process refused its settings (its message is above)")


@dataclass(slots=True)
class Backoff:
    """Seconds to wait before a restart: doubling, and back to the first after a long life."""

    first: float = 0.2
    longest: float = 10.0
    long_life: float = 60.0
    _next: float = field(init=False, default=0.0)

    def after(self, lived_seconds: float) -> float:
        """Return the pause before the next start of a child that lived this long."""
        if lived_seconds >= self.long_life or self._next == 0.0:
            self._next = self.first
        pause, self._next = self._next, min(self.longest, 2 * self._next)
        return pause


class Child:
    """Keeps one process running until told to stop.

    `payload` makes the JSON document that start number `generation` (from 1) reads on its
    standard input, so that secrets appear on no command line. `environment` None passes ours on.
    With `silence_seconds` the command gets one more argument, the descriptor to beat on; a
    child that once gave signs of life there and then none for so long is killed and restarted.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        payload: Callable[[int], bytes],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        silence_seconds: float | None = None,
    ) -> None:
        self.name = name
        self.generation = 0
        self._command = command
        self._payload = payload
        self._pass_fds = pass_fds
        self._environment = environment
        self._silence_seconds = silence_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process id, while there is one."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Start the process and restart it whenever it ends; return after `stop`.

        Raises `ChildCannotStart` when the process refuses its configuration.
        """
        backoff = Backoff()
        while not self._stop.is_set():
            started = time.monotonic()
            code = await self._run_once()
            if self._stop.is_set():
                return
            if code == CONFIG_ERROR_EXIT_CODE:
                raise ChildCannotStart(self.name)
            pause = backoff.after(time.monotonic() - started)
            _log.error("child_died", child=self.name, exit_code=code, restart_in_seconds=pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)

    async def _run_once(self) -> int:
        self.generation += 1
        if self._silence_seconds is None:
            await self._spawn(*self._command)
            return await self._wait()
        with Pulse(self._silence_seconds, self._kill_silent) as pulse:
            await self._spawn(*self._command, str(pulse.child_fd), pulse_fds=[pulse.child_fd])
            pulse.hand_over()
            return await self._wait()

    async def _spawn(self, *command: str, pulse_fds: Sequence[int] = ()) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, pass_fds=[*self._pass_fds, *pulse_fds],
            env=self._environment,
            start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone
        )  # fmt: skip

    async def _wait(self) -> int:
        assert self._process is not None
        if self._stop.is_set():  # asked to stop while it was being spawned
            self._process.terminate()
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died at once: its exit code tells
            self._process.stdin.write(self._payload(self.generation))
            await self._process.stdin.drain()
        self._process.stdin.close()
        return await self._process.wait()

    def signal_stop(self) -> None:
        """Ask the process to finish what it has and end; it is not restarted any more."""
        self._stop.set()
        self._send(signal.SIGTERM)

    def signal_hurry(self) -> None:
        """After `signal_stop`: have it end what it has now; for a child that heeds SIGINT."""
        self._send(signal.SIGINT)

    def kill(self) -> None:
        """End the process now."""
        self._stop.set()
        self._send(signal.SIGKILL)

    def _kill_silent(self) -> None:
        _log.error("child_silent", child=self.name, seconds=self._silence_seconds)
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
