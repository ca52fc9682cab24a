"""Adapters in host memory and on local disk: fetched once, read on threads, evicted when idle.

A wanted adapter goes absent -> needed (a client was asked for its files, once) -> reading (on a
thread) -> ready, or it fails. A failure is reported once, and the next `prefetch` tries again.

Between needed and reading it may be *deferred*: while host memory is full of adapters that
sequences want, the next one is read only when one of them is released; or at once, if the core
needs it to fill a slot. So memory is bounded by the limits plus the slots, and no slot waits for
ever.

Adapters that are *kept* stay in host memory whether or not a sequence wants them.
"""

import queue
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from adapter_store.digest import is_digest
from engine.adapters.disk import AdapterDisk
from engine.adapters.host_memory import HostEntry, HostMemory, HostState, HostWeights
from engine.adapters.source import AdapterEvent, AdapterFailed, AdapterReady

NUM_READERS = 2
"""Threads: one reads while another converts."""
TOUCH_SECONDS = 10.0
"""How often the use of adapters that stay wanted is noted on disk."""


@dataclass(frozen=True, slots=True)
class _ReadDone:
    entry: HostEntry
    weights: HostWeights | None
    reason: str = ""


class AdapterHost:
    """The engine's `AdapterSource`: all methods belong to the step loop's thread.

    `load(digest, folder)` runs on a thread and raises if the files cannot be served; `need(digest)`
    asks a client for them, answered by `have` or `fetch_failed`; `wake()` is called, from any
    thread, when `poll` has something to do.
    """

    def __init__(
        self,
        cache_dir: Path,
        load: Callable[[str, Path], HostWeights],
        *,
        need: Callable[[str], None],
        max_cpu_loras: int,
        cpu_lora_bytes: int,
        disk_lora_bytes: int,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._need = need
        self._memory = HostMemory(max_cpu_loras, cpu_lora_bytes)
        self._wake = wake
        self._clock = clock
        self._threads = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="adapter-reader")
        self._disk = AdapterDisk(
            cache_dir,
            disk_lora_bytes,
            discard=lambda folder: self._threads.submit(shutil.rmtree, folder, ignore_errors=True),
        )
        self._deferred: OrderedDict[str, HostEntry] = OrderedDict()
        self._ahead: dict[str, None] = {}
        """Adapters still to be read ahead, in order."""
        self._unwelcome: set[str] = set()
        """Adapters forgotten while a client fetched them: removed again when their files come."""
        self._next_touch = clock() + TOUCH_SECONDS
        self._events: list[AdapterEvent] = []
        self._done: queue.SimpleQueue[_ReadDone] = queue.SimpleQueue()
        self._log = structlog.get_logger("engine.adapters")

    @property
    def num_adapters(self) -> int:
        """Adapters in host memory, those being read included."""
        return self._memory.num_held

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in host memory."""
        return self._memory.held_bytes

    @property
    def kept(self) -> frozenset[str]:
        """Adapters that stay in host memory whether or not a sequence wants them."""
        return self._memory.kept

    @property
    def recent(self) -> list[str]:
        """Adapters on local disk, the most recently used first."""
        return self._disk.recent

    def is_coming(self, digest: str) -> bool:
        """Whether an adapter is on its way to host memory."""
        entry = self._memory.entries.get(digest)
        return digest in self._ahead if entry is None else entry.state is not HostState.READY

    def has(self, digest: str) -> bool:
        """Whether an adapter is in host memory; does not count as a use."""
        entry = self._memory.entries.get(digest)
        return entry is not None and entry.state is HostState.READY

    def keep(self, digests: Iterable[str]) -> None:
        """Replace the set of kept adapters; absent ones are fetched, failed ones again."""
        before, kept = self._memory.kept, frozenset(filter(is_digest, digests))
        self._memory.kept = kept
        for digest in sorted(kept | before):
            entry = self._memory.entries.get(digest)
            if entry is not None:
                self._reconsider(entry)
            elif digest in kept:
                self._begin(digest, wanted=False)
        self._settle()

    def read_ahead(self, digests: Iterable[str]) -> None:
        """Read adapters from disk that nobody wants yet, while there is room.

        Never more at once than there are threads, so that a wanted read goes before the rest.
        """
        self._ahead = dict.fromkeys(filter(is_digest, digests))
        self._go_on_ahead()

    def prefetch(self, digest: str) -> None:
        """Start to bring an adapter to host memory; see `AdapterSource`."""
        entry = self._memory.entries.get(digest)
        if entry is None:
            self._begin(digest)
            return
        entry.wanted = True
        self._memory.settle(entry)
        if entry.state is HostState.READY:
            self._emit(AdapterReady(digest, 0.0))

    def poll(self) -> list[AdapterEvent]:
        """What arrived or failed since the last call."""
        self._note_use()
        while not self._done.empty():
            done = self._done.get_nowait()
            # A forgotten adapter's read comes back to an entry that is no longer ours.
            if self._memory.entries.get(done.entry.digest) is done.entry:
                self._finish_read(done)
        events, self._events = self._events, []
        return events

    def hasten(self, digest: str) -> None:
        """Read an adapter as soon as its files are there, past the limits; see `AdapterSource`."""
        entry = self._memory.entries.get(digest)
        if entry is None:
            return
        entry.is_hastened = True
        if entry.state is HostState.DEFERRED:
            del self._deferred[digest]
            self._read(entry)

    def get(self, digest: str) -> HostWeights | None:
        """The weights if they are in host memory; see `AdapterSource`."""
        entry = self._memory.entries.get(digest)
        self._memory.note_use(digest)
        return None if entry is None else entry.weights

    def release(self, digest: str) -> None:
        """No sequence wants this adapter any more; it stays while there is room."""
        entry = self._memory.entries.get(digest)
        if entry is None or not entry.wanted:
            return
        entry.wanted = False
        if entry.state is HostState.READY:
            self._disk.touch(digest)
        self._reconsider(entry)
        self._settle()

    def forget(self, digest: str) -> None:
        """Drop the adapter from memory and disk."""
        if not is_digest(digest):
            return
        self._memory.kept -= {digest}
        self._ahead.pop(digest, None)
        entry = self._memory.entries.get(digest)
        if entry is not None and entry.state is HostState.NEEDED:
            self._unwelcome.add(digest)
        self._drop(digest)
        self._disk.remove(digest)
        self._settle()

    def have(self, digest: str) -> None:
        """A client says that the files lie on disk now."""
        entry = self._memory.entries.get(digest)
        if digest in self._unwelcome:
            self._unwelcome.remove(digest)
            self._disk.remove(digest)
        elif entry is None:
            # Nobody waits for it any more, but it counts, so that the disk stays bounded.
            if is_digest(digest) and self._disk.find(digest) is not None:
                self._trim_disk()
        elif entry.state is HostState.NEEDED:
            self._fetched(entry)

    def fetch_failed(self, digest: str, reason: str) -> None:
        """A client says that the files cannot be had."""
        self._unwelcome.discard(digest)
        entry = self._memory.entries.get(digest)
        if entry is not None and entry.state is HostState.NEEDED:
            self._fail(entry, reason)

    def close(self) -> None:
        """Wait for reads in progress and stop the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts and lists disagree."""
        self._memory.check_integrity()
        entries = self._memory.entries
        deferred = {d for d, entry in entries.items() if entry.state is HostState.DEFERRED}
        assert self._deferred.keys() == deferred, "wrongly (not) deferred"
        assert not self._unwelcome & entries.keys(), "wanted and unwelcome"

    def _reconsider(self, entry: HostEntry) -> None:
        """Act on an entry that became needed or stopped being needed."""
        if entry.state is HostState.DEFERRED and not self._memory.is_needed(entry):
            self._drop(entry.digest)
        else:
            self._memory.settle(entry)

    def _go_on_ahead(self) -> None:
        while self._ahead and not self._deferred and self._memory.num_reading < NUM_READERS:
            digest = next(iter(self._ahead))
            del self._ahead[digest]
            size = self._disk.size(digest)
            if size is None or digest in self._memory.entries:
                continue
            if not self._memory.has_room(size):
                self._ahead.clear()
                return
            entry = HostEntry(digest, since=self._clock(), wanted=False, num_bytes=size)
            self._memory.entries[digest] = entry
            self._read(entry, is_use=False)

    def _note_use(self) -> None:
        now = self._clock()
        if now >= self._next_touch:
            self._next_touch = now + TOUCH_SECONDS
            for entry in self._memory.entries.values():
                if entry.wanted and entry.state is HostState.READY:
                    self._disk.touch(entry.digest)

    def _begin(self, digest: str, *, wanted: bool = True) -> None:
        if not is_digest(digest):
            self._emit(AdapterFailed(digest, "not an adapter digest"))
            return
        self._unwelcome.discard(digest)
        entry = self._memory.entries[digest] = HostEntry(digest, since=self._clock(), wanted=wanted)
        if self._disk.find(digest) is None:
            self._need(digest)
        else:
            self._fetched(entry)

    def _fetched(self, entry: HostEntry) -> None:
        size = self._disk.find(entry.digest)
        if size is None:
            self._damaged(entry, "its files are missing from the cache folder")
            return
        if not self._memory.is_needed(entry):
            self._drop(entry.digest)
            self._trim_disk()
            return
        entry.num_bytes = size
        if entry.is_hastened:
            self._read(entry)
        else:
            entry.state = HostState.DEFERRED
            self._deferred[entry.digest] = entry
        self._trim_disk()
        self._settle()

    def _trim_disk(self) -> None:
        entries = self._memory.entries.values()
        self._disk.trim(
            {e.digest for e in entries if self._memory.is_needed(e) or e.state is HostState.READING}
        )

    def _settle(self) -> None:
        """Evict idle adapters past the limits, then read deferred ones while there is room."""
        self._memory.trim()
        while self._deferred:
            entry = next(iter(self._deferred.values()))
            if not self._memory.make_room(entry.num_bytes):
                self._ahead.clear()
                return
            del self._deferred[entry.digest]
            self._read(entry)
        self._go_on_ahead()

    def _drop(self, digest: str) -> None:
        self._deferred.pop(digest, None)
        self._memory.drop(digest)

    def _read(self, entry: HostEntry, *, is_use: bool = True) -> None:
        self._memory.begin_read(entry)
        if is_use:
            self._disk.touch(entry.digest)
        self._threads.submit(self._read_on_thread, entry, self._disk.path(entry.digest))

    def _read_on_thread(self, entry: HostEntry, folder: Path) -> None:
        try:
            done = _ReadDone(entry, self._load(entry.digest, folder))
        except BaseException as error:  # whatever a damaged file provokes, a panic in Rust included
            done = _ReadDone(entry, None, str(error) or type(error).__name__)
        self._done.put(done)
        self._wake()

    def _finish_read(self, done: _ReadDone) -> None:
        entry = done.entry
        if done.weights is None:
            self._memory.read_failed(entry)
            self._damaged(entry, done.reason)
            self._settle()
            return
        self._memory.read_done(entry, done.weights)
        seconds = self._clock() - entry.since
        self._log.info("adapter_read", adapter=entry.digest[:12], seconds=round(seconds, 4))
        self._emit(AdapterReady(entry.digest, seconds))
        self._settle()

    def _damaged(self, entry: HostEntry, reason: str) -> None:
        self._disk.remove(entry.digest)
        if entry.refetched or not self._memory.is_needed(entry):
            self._fail(entry, reason)
            return
        self._log.warning("adapter_damaged", adapter=entry.digest[:12], reason=reason)
        entry.refetched = True
        entry.state = HostState.NEEDED
        self._need(entry.digest)

    def _fail(self, entry: HostEntry, reason: str) -> None:
        del self._memory.entries[entry.digest]
        self._log.warning("adapter_failed", adapter=entry.digest[:12], reason=reason)
        if entry.wanted:  # else it would hit whoever asks for it before the next poll
            self._emit(AdapterFailed(entry.digest, reason))

    def _emit(self, event: AdapterEvent) -> None:
        self._events.append(event)
        self._wake()
