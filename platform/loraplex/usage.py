"""Usage rows, written in group commits: a reply's last frame waits for its row, a second at most.

A database that is slow or away holds up no reply for longer; what is not written waits here, and
on the disk from one start to the next.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.records import UsageRecord
from adapter_store.registry.registry import Registry
from adapter_store.registry.transactions import utc_now
from engine.messages import CallUsage, RequestTiming
from loraplex.usage_spill import spill

_log = structlog.get_logger("loraplex.usage")

_MAX_BATCH = 256
_WAIT_SECONDS = 1.0
_LAST_SECONDS = 1.0
"""For what is queued at a stop, before it goes to the disk: who takes long to end is killed."""

Settle = Callable[[list[str]], None]
"""Told the request ids whose rows are in the database or on the disk, or can never be."""


def row_of(call: CallUsage) -> UsageRecord:
    """Return the row of a call whose own API process did not write it."""
    name, _, version = call.label.rpartition("@")
    timing = call.timing or RequestTiming(queue={}, prefill=0.0, decode=0.0)
    return UsageRecord(
        request_id=call.call,
        tenant=call.tenant,
        adapter=None if call.is_base else name,
        version=None if call.is_base else int(version),
        prompt_tokens=call.prompt_tokens,
        cached_tokens=call.cached_tokens,
        output_tokens=call.output_tokens,
        finish_reason=",".join(call.finish_reasons),
        queue_seconds=timing.queue_seconds,
        load_seconds=timing.queue.get("load", 0.0),
        prefill_seconds=timing.prefill,
        decode_seconds=timing.decode,
        engine_seconds=call.engine_seconds,
    )


async def write_rows(registry: Registry, rows: Sequence[UsageRecord]) -> int:
    """Store a batch, or what is good of it: one bad row must not hold up the others for ever.

    Returns how many are stored now. Raises `RegistryUnavailable`; some of them may be stored then.
    """
    num_stored = 0
    try:
        await registry.record_usage(*rows)
        num_stored = len(rows)
    except RegistryUnavailable:
        raise
    except Exception as reason:  # one bad row spoils its batch: each has a try of its own
        _log.error("usage_batch_refused", error=type(reason).__name__, rows=len(rows))
        for row in rows:
            try:
                await registry.record_usage(row)
                num_stored += 1
            except RegistryUnavailable:
                raise
            except Exception as error:  # this one is lost, and the log says so
                _log.error("usage_lost", request_id=row.request_id, error=type(error).__name__)
    return num_stored


class UsageWriter:
    """An async context manager; leaving it writes what is still queued, to the disk if need be.

    A batch that the database refuses is tried again with growing pauses while newer ones wait.
    Beyond `max_queued` records the newest are dropped, and counted in the log. `settle` is told of
    those that are done with. What the database has not taken a second after the end goes to a file
    in `spill_dir`.
    """

    def __init__(
        self, registry: Registry, spill_dir: Path, settle: Settle = lambda request_ids: None, *,
        max_queued: int = 100_000, retry_seconds: float = 0.5,
    ) -> None:  # fmt: skip
        self._registry = registry
        self._spill_dir = spill_dir
        self._settle = settle
        self._max_queued = max_queued
        self._retry_seconds = retry_seconds
        self._queue: deque[UsageRecord] = deque()
        self._arrived = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_dropped = 0
        self._num_recorded = 0
        self._num_done = 0
        self._readers: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Who waits, and for how many rows to be done with; the fewest first."""
        self._is_behind = False
        """Whether the database did not take the last batch."""

    @property
    def num_pending(self) -> int:
        """Rows that are not written yet."""
        return len(self._queue)

    def record(self, usage: UsageRecord) -> None:
        """Queue a row; synchronous, so that it works while a task is being cancelled."""
        if len(self._queue) >= self._max_queued:
            self._num_dropped += 1
            return
        # When it was used, however long it waits.
        self._queue.append(replace(usage, created_at=usage.created_at or utc_now()))
        self._num_recorded += 1
        self._arrived.set()

    async def written(self) -> None:
        """Wait until the rows that are queued now can be read by everybody.

        Not for long: at most a second, and not at all while the database does not answer.
        """
        if self._is_behind or self._num_done >= self._num_recorded:
            return
        future = asyncio.get_running_loop().create_future()
        self._readers.append((self._num_recorded, future))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_SECONDS):
                await future

    def adopt(self, calls: Sequence[CallUsage]) -> None:
        """Queue the rows of calls that another API process has left."""
        _log.info("usage_adopted", rows=len(calls))
        for call in calls:
            self.record(row_of(call))

    async def _flush(self) -> None:
        while self._queue:
            batch = list(itertools.islice(self._queue, _MAX_BATCH))
            await write_rows(self._registry, batch)
            for _ in batch:
                self._queue.popleft()
            self._num_done += len(batch)
            self._is_behind = False
            self._tell_readers(self._num_done)
            self._settle([usage.request_id for usage in batch])

    def _tell_readers(self, num_done: int) -> None:
        while self._readers and self._readers[0][0] <= num_done:
            _, future = self._readers.popleft()
            if not future.done():
                future.set_result(None)

    async def _spill(self) -> None:
        rows = list(self._queue)
        try:
            path = await asyncio.to_thread(spill, self._spill_dir, rows)
        except OSError as error:
            _log.error("usage_not_spilled", rows=len(rows), error=error.strerror)
            return
        _log.warning("usage_spilled", rows=len(rows), file=path.name)
        self._settle([usage.request_id for usage in rows])

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="usage")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._arrived.set()
        if self._task is None:
            return
        await asyncio.wait([self._task], timeout=_LAST_SECONDS)
        if self._queue:
            await self._spill()
        self._task.cancel()  # it may hang in the database for longer than there is time
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        pause = self._retry_seconds
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            try:
                await self._flush()
                pause = self._retry_seconds
            except RegistryUnavailable:
                _log.warning("usage_not_written", rows=len(self._queue))
                self._is_behind = True
                self._tell_readers(self._num_recorded)
                self._arrived.set()
                if self._closing.is_set():
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause)
                pause = min(2 * pause, 30.0)
            if self._num_dropped:
                _log.error("usage_dropped", rows=self._num_dropped)
                self._num_dropped = 0
            if self._closing.is_set() and not self._queue:
                return
