"""The cache that the API processes of a service share, and how they tell each other of changes.

Nothing here is the truth: the registry's rows are. An entry lives for about a second, so whatever
is lost (an event, a stamp, the whole server) is made good by then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Forget = Callable[[str | None], None]
"""Told a topic that another process changed; None: any of them may have changed."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a key. `stamp` is to be given back with a value that is read after this."""

    value: bytes | None = None
    life_seconds: float = 0.0
    """How long the value may be kept."""
    stamp: int | None = None
    """The topic's; None: the cache does not answer, and takes nothing."""


class SharedCache(Protocol):
    """Values by topic and key. No method raises: a cache that is away is an empty one."""

    @property
    def is_degraded(self) -> bool:
        """Whether it should be shared and is not, so that the database does all the work."""
        ...

    async def read(self, topic: str, key: str) -> Found:
        """Look a key up; a value from before the topic's last change is not found."""
        ...

    async def write(
        self, topic: str, key: str, value: bytes, stamp: int, life_seconds: float
    ) -> None:
        """Keep a value that was read from the database after `read` gave `stamp`."""
        ...

    async def invalidate(self, topic: str) -> None:
        """Make all values of the topic not found, and tell the other processes."""
        ...

    def subscribe(self, forget: Forget) -> None:
        """Call `forget` at changes by other processes, and whenever some may have been missed."""
        ...


class OneProcess:
    """A `SharedCache` for a process that shares with nobody."""

    is_degraded = False

    async def read(self, topic: str, key: str) -> Found:
        """See `SharedCache.read`."""
        return Found()

    async def write(
        self, topic: str, key: str, value: bytes, stamp: int, life_seconds: float
    ) -> None:
        """See `SharedCache.write`."""

    async def invalidate(self, topic: str) -> None:
        """See `SharedCache.invalidate`."""

    def subscribe(self, forget: Forget) -> None:
        """See `SharedCache.subscribe`."""
