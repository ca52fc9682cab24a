"""A service on a scripted engine that takes a step only when the test lets it.

Each step is held once it is planned: what a client does meanwhile meets a busy engine, and nothing
ends by itself. Only `step` lets it go on, while something runs or waits for a place.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import SchedulerConfig
from engine.parts import EngineParts
from engine.scheduled_batch import ScheduledBatch
from engine.scheduling.sequence import Sequence
from engine.transport.inline_client import InlineEngineClient
from tests.support.scripted_engine import (
    ScriptedRunner,
    endless,
    put_fake_adapter,
    scripted_parts,
)
from tests.support.service import TestService, running_service
from tests.support.waiting import eventually, until_idle

FAILING = 9
"""A row whose prompt begins with this token fails."""


class Steps:
    """Holds each step at its beginning; its runner's `before_step`."""

    def __init__(self) -> None:
        self.batches: list[ScheduledBatch] = []
        self._changed = threading.Condition()
        self._num_allowed = 0
        self._is_open = False

    def __call__(self, batch: ScheduledBatch) -> None:
        with self._changed:
            self.batches.append(batch)
            number = len(self.batches)
            assert self._changed.wait_for(lambda: self._is_open or self._num_allowed >= number, 60)

    def let_go(self) -> None:
        """The step that is held may go on; the next one is held."""
        with self._changed:
            self._num_allowed = len(self.batches)
            self._changed.notify_all()

    def open(self) -> None:
        """No step is held any more."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def hold(self) -> None:
        """From the next one on, steps are held again."""
        with self._changed:
            self._is_open = False


@dataclass(frozen=True)
class SteppedService:
    service: TestService
    engine: InlineEngineClient
    parts: EngineParts
    cache_dir: Path
    steps: Steps
    never: set[str] = field(default_factory=set[str])
    """Digests whose files do not come before `files_come`."""
    broken: set[str] = field(default_factory=set[str])
    """Digests whose files cannot be had."""
    files_come: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_open(self) -> int:
        """Requests that the service has with the engine, those included that it does not know of
        yet because a step is held."""
        return len(self.engine._requests.ids)  # pyright: ignore[reportPrivateUsage]

    def running(self, tenant: str) -> list[Sequence]:
        """A tenant's running sequences."""
        lifecycle = self.parts.core._scheduler._lifecycle  # pyright: ignore[reportPrivateUsage]
        return [s for s in lifecycle.running if s.request.message.tenant == tenant]

    async def step(self, count: int = 1) -> None:
        """Let the held step go on, until the next one is held; `count` times.

        What the step began to read from the disk has been read then.
        """
        host = self.parts.host
        for _ in range(count):
            number = len(self.steps.batches)
            self.steps.let_go()
            await self.until(lambda number=number: len(self.steps.batches) > number)
            await self.until(lambda: host._memory.num_reading <= host._done.qsize())  # pyright: ignore[reportPrivateUsage]

    async def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(200):
            if condition():
                return
            await self.step()
        raise AssertionError("it does not come to that")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait, without a step."""
        await eventually(condition)

    async def until_idle(self) -> None:
        """Wait until the engine has nothing, and see that nothing is held."""
        await until_idle(self.engine)
        self.parts.core.check_integrity()
        self.parts.host.check_integrity()

    async def fetch(self, digest: str) -> None:
        if digest in self.never:
            await self.files_come.wait()
        if digest in self.broken:
            raise FileNotFoundError("no such files")
        put_fake_adapter(self.cache_dir, digest)


@contextlib.asynccontextmanager
async def stepped_service(root: Path, **config: Any) -> AsyncIterator[SteppedService]:
    """Steps are held from the first one on; `config` is the scheduler's."""
    steps = Steps()
    runner = ScriptedRunner(endless, before_step=steps, failing_rows=frozenset([FAILING]))
    parts = scripted_parts(runner, root / "cache", config=SchedulerConfig(**config))
    made: list[SteppedService] = []

    async def fetch(digest: str) -> None:
        await made[0].fetch(digest)

    async with (
        InlineEngineClient(parts, fetch, threaded=True) as engine,
        running_service(root, engine) as service,
    ):
        made.append(SteppedService(service, engine, parts, root / "cache", steps))
        try:
            yield made[0]
        finally:
            steps.open()
