"""Where adapter weights come from, as the engine core sees it.

The core never reads a file: it asks a source to bring an adapter to host memory, polls for what
arrived, and hands the weights to the runner when the scheduler has given the adapter a slot.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class AdapterReady(NamedTuple):
    """The weights of `digest` are in host memory."""

    digest: str
    seconds: float
    """How long it took, from the first `prefetch` on."""


class AdapterFailed(NamedTuple):
    """The weights of `digest` cannot be had; a later `prefetch` tries again."""

    digest: str
    reason: str


AdapterEvent = AdapterReady | AdapterFailed


class AdapterSource(Protocol):
    """Adapters in host memory, by digest. No method blocks; all are called between steps."""

    def prefetch(self, digest: str) -> None:
        """Somebody wants this adapter: start to bring it to host memory. Idempotent.

        An event answers it, even if the weights are in host memory already.
        """
        ...

    def poll(self) -> Sequence[AdapterEvent]:
        """What arrived or failed since the last call, in order."""
        ...

    def hasten(self, digest: str) -> None:
        """A prefetched adapter is about to fill a slot: read it first, past the limits if need be.

        Does nothing if it is in host memory.
        """
        ...

    def get(self, digest: str) -> Any | None:
        """The weights if they are in host memory; counts as a use for the LRU order."""
        ...

    def release(self, digest: str) -> None:
        """No sequence wants this adapter any more: it may be evicted, least recently used first."""
        ...

    def forget(self, digest: str) -> None:
        """Drop the adapter for good; called once no sequence wants it and no slot holds it."""
        ...
