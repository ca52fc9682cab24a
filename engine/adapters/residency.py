"""Which adapters an engine keeps regardless of their use, and when a new engine is warm.

The service says repeatedly which adapters are pinned and which are warm, each time all of them
(`SetResidency`). A new engine loads those, and the adapters that were used last before it started.
Until that is done, or has taken too long, the engine is *warming*: it serves requests, but asks to
be spared new ones.
"""

import time
from collections.abc import Callable, Iterable

import structlog

from adapter_store.digest import is_digest
from engine.adapters.host import AdapterHost
from engine.core import EngineCore


class Residency:
    """Belongs to the step loop's thread.

    The scheduler takes at most `max_pinned` adapters; pinned ones beyond that are kept in host
    memory. At most `num_recent` adapters are read ahead. With `warm_up_seconds` 0 the engine is
    warm from the start.
    """

    def __init__(
        self,
        core: EngineCore,
        host: AdapterHost,
        *,
        max_pinned: int,
        num_recent: int,
        warm_up_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._host = host
        self._max_pinned = max_pinned
        self._clock = clock
        self._started = clock()
        self._warm_up_seconds = warm_up_seconds
        self._is_warming = warm_up_seconds > 0
        self._awaited: set[str] | None = None
        """Adapters it still waits for before it is warm; None until it was told what to keep."""
        self._num_recent = num_recent
        self.pinned: tuple[str, ...] = ()
        self.warm: tuple[str, ...] = ()
        self._log = structlog.get_logger("engine.residency")

    def set(self, pinned: Iterable[str], warm: Iterable[str], recent: Iterable[str] = ()) -> None:
        """Replace what is pinned and warm. Only the first call uses `recent`, to read ahead."""
        wanted = [digest for digest in dict.fromkeys(pinned) if is_digest(digest)]
        before, self.pinned = self.pinned, tuple(wanted[: self._max_pinned])
        beyond = wanted[self._max_pinned :]
        if beyond and self.pinned != before:
            self._log.warning("too_many_pinned", limit=self._max_pinned, beyond=len(beyond))
        self.warm = tuple(dict.fromkeys((*beyond, *filter(is_digest, warm))))
        self._core.pin(frozenset(self.pinned))
        self._host.keep(self.warm)
        if self._awaited is None:
            ahead = [digest for digest in recent if is_digest(digest)][: self._num_recent]
            self._host.read_ahead(ahead)
            self._awaited = {*self.pinned, *self.warm, *ahead}

    @property
    def is_warming(self) -> bool:
        """Whether the engine still loads what it starts with; once False, it stays False."""
        if self._is_warming:
            seconds = self._clock() - self._started
            is_late = seconds >= self._warm_up_seconds
            if is_late or (self._awaited is not None and not self._has_awaited()):
                self._is_warming = False
                self._log.info(
                    "warm", seconds=round(seconds, 3), adapters=self._host.num_adapters,
                    is_complete=not is_late,
                )  # fmt: skip
        return self._is_warming

    def _has_awaited(self) -> bool:
        assert self._awaited is not None
        placed = self._core.resident
        self._awaited = {
            digest
            for digest in self._awaited
            if self._host.is_coming(digest)
            or (digest in self.pinned and digest not in placed and self._host.has(digest))
        }
        return bool(self._awaited)
