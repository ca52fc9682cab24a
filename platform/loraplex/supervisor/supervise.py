"""The supervisor's loop: start the engine, the API processes and the recorder, restart what dies,
stop in order.

The listening socket belongs to the supervisor and is inherited by the API processes, so that no
connection is refused while one of them restarts.
"""

import asyncio
import contextlib
import signal

import structlog
from rich.console import Console

from loraplex.supervisor.child import Child
from loraplex.supervisor.children import Service, api_children, engine_child, recorder_child

_log = structlog.get_logger("loraplex.supervisor")

_STOP_GRACE_SECONDS = 5.0
"""What an API process gets beyond its drain limit, and the engine once nobody calls it."""


async def supervise(service: Service) -> None:
    """Run the service until SIGTERM or SIGINT, then stop it in order; a SIGINT after that ends at
    once what still runs.

    Raises `ChildCannotStart` when a process refuses its settings.
    """
    engine, apis, recorder = engine_child(service), api_children(service), recorder_child(service)
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    # A repeated SIGTERM is no hurry: `timeout` and some init systems send it twice.
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: (hurry if stop.is_set() else stop).set())
    running = {
        child: asyncio.create_task(child.run(), name=child.name)
        for child in (engine, *apis, recorder)
    }
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([stopped, *running.values()], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if stop.is_set():  # else a process has just said why it cannot start: the last word
            _tell_stop(service.drain_seconds)
        service.listener.close()  # from now on a connection is refused: not ready at once
        # The engine goes last: the streams that drain need it, and what it did is read after them.
        grace = service.drain_seconds + _STOP_GRACE_SECONDS
        await _stop([(api, running[api]) for api in apis], grace, hurry)
        await _stop([(recorder, running[recorder])], _STOP_GRACE_SECONDS)
        await _stop([(engine, running[engine])], _STOP_GRACE_SECONDS)
    for task in running.values():
        task.result()


def _tell_stop(drain_seconds: float) -> None:
    """In a terminal a sentence, elsewhere a line of the log."""
    console = Console(stderr=True)
    if not console.is_terminal:
        _log.info("stopping", drain_seconds=drain_seconds)
    else:
        console.print(
            f"\nStopping: what runs may go on for {drain_seconds:g} s; "
            "Ctrl-C again ends it at once.",
            highlight=False,
        )


async def _stop(
    children: list[tuple[Child, asyncio.Task[None]]],
    grace: float,
    hurry: asyncio.Event | None = None,
) -> None:
    """Signal the children, wait, kill those that are still there, and wait for those too.

    With `hurry` the wait is over when that is set: what the children have is ended then.
    """
    for child, _ in children:
        child.signal_stop()
    tasks = [task for _, task in children]
    hurrying = None if hurry is None else asyncio.create_task(_end_at_once(children, hurry))
    await asyncio.wait(tasks, timeout=grace)
    if hurrying is not None:
        hurrying.cancel()
    for child, task in children:
        if not task.done():
            _log.warning("killing", child=child.name, after_seconds=grace)
            child.kill()
    with contextlib.suppress(Exception):  # `supervise` reports what a child raised
        await asyncio.gather(*tasks)


async def _end_at_once(
    children: list[tuple[Child, asyncio.Task[None]]], hurry: asyncio.Event
) -> None:
    """When `hurry` is set, have the children end what they have, and kill those that do not."""
    await hurry.wait()
    _log.info("stopping_at_once")
    for child, _ in children:
        child.signal_hurry()
    await asyncio.sleep(_STOP_GRACE_SECONDS)
    for child, task in children:
        if not task.done():
            _log.warning("killing", child=child.name, after_seconds=_STOP_GRACE_SECONDS)
            child.kill()
