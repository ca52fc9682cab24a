"""The recorder's process: `python -m loraplex.recorder.process`, its arguments on standard input.

A process of its own, and not a task of the supervisor: the supervisor judges by pipes whether its
children live, and its loop must not stand still while thousands of sketches are merged; a fault
here must not end the service; and the kernel can give this work what serving leaves (`nice`). It
costs some 60 MB. When it dies the supervisor starts it again, and it goes on from what it wrote.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.session import Database
from engine.logs import configure_logs
from engine.parent import die_with_parent
from loraplex.recorder.alert_desk import AlertDesk
from loraplex.recorder.engine_reader import EngineReader
from loraplex.recorder.recorder import Recorder
from loraplex.recorder.standings import Standings
from loraplex.recorder.store import RollupStore
from loraplex.recorder.sweep import sweep
from loraplex.recorder.widths import Range

_log = structlog.get_logger("loraplex.recorder")

NICENESS = 5
READ_SECONDS = 1.0
LAST_READ_SECONDS = 1.0
ALERT_SECONDS = 10.0
SWEEP_SECONDS = 60.0
STANDING_SECONDS: dict[Range, float] = {"5m": 10.0, "1h": 20.0, "24h": 60.0}
BUSY_SHARE = 0.05
"""Of the time, what a window's rows may take; with very many adapters they are computed less often.
"""


Chore = Callable[[], Awaitable[object]]


class RecorderArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is started with."""

    database_url: str
    engine_socket: str
    run: str
    """Of the service."""


async def record(args: RecorderArgs, stop: asyncio.Event) -> None:
    """Record until told to stop; what was read by then is written."""
    database = Database(args.database_url)
    standings, desk = Standings(database), AlertDesk(database)
    try:
        async with EngineReader(Path(args.engine_socket)) as engine:
            recorder = Recorder(engine, RollupStore(database), args.run)
            if not await _begin(recorder, stop):
                return
            chores: list[tuple[Chore, float]] = [
                (partial(standings.refresh, range_), seconds)
                for range_, seconds in STANDING_SECONDS.items()
            ]
            chores.append((lambda: desk.look(recorder.heard_at), ALERT_SECONDS))
            chores.append((lambda: database.write(lambda s: sweep(s, time.time())), SWEEP_SECONDS))
            async with asyncio.TaskGroup() as tasks:
                for chore, seconds in chores:
                    tasks.create_task(_again(chore, seconds, stop))
                await _keep_recording(recorder, standings, stop)
    finally:
        await database.close()


async def _begin(recorder: Recorder, stop: asyncio.Event) -> bool:
    """Find out where to go on; False if told to stop before the database has said it."""
    while True:
        try:
            await recorder.start()
            return True
        except RegistryUnavailable:
            _log.warning("registry_away")
        if stop.is_set():
            return False
        await _pause(stop, READ_SECONDS)


async def _keep_recording(recorder: Recorder, standings: Standings, stop: asyncio.Event) -> None:
    """Read every second, write every other; and once more at the end, both."""
    is_last = is_due = False
    while not is_last:
        is_last = stop.is_set()
        await _read(recorder, stop, is_last=is_last)
        is_due = not is_due
        if is_due or is_last:
            try:
                standings.touch(await recorder.write())
            except RegistryUnavailable:
                _log.warning("rollups_not_written")
        await _pause(stop, READ_SECONDS)


async def _read(recorder: Recorder, stop: asyncio.Event, *, is_last: bool) -> None:
    """Read; once told to stop, an engine that does not answer is not waited for."""
    reading = asyncio.create_task(recorder.read(is_last=is_last))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not reading.done():
        await asyncio.wait([reading], timeout=LAST_READ_SECONDS)
        reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading


async def _again(chore: Chore, seconds: float, stop: asyncio.Event) -> None:
    while not stop.is_set():
        began = time.monotonic()
        try:
            await chore()
        except RegistryUnavailable:
            _log.warning("registry_away")
        except Exception:  # recording goes on, whatever is wrong with what is made of it
            _log.exception("chore_failed")
        took = time.monotonic() - began
        await _pause(stop, max(seconds, took / BUSY_SHARE))


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


async def _main(args: RecorderArgs) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await record(args, stop)


def main() -> None:
    """Read the arguments and record until told to stop."""
    die_with_parent()
    os.nice(NICENESS)
    configure_logs(process="recorder")
    args = msgspec.json.decode(sys.stdin.buffer.read(), type=RecorderArgs)
    asyncio.run(_main(args))


if __name__ == "__main__":
    main()
