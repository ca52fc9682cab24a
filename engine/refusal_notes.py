"""What the service refused before the engine heard of it, counted until the engine is told."""

from collections.abc import Callable

import msgspec

MAX_KEYS = 10_000
"""Tenants, adapters and reasons that are told apart; of more, nothing is counted."""


class Refusals(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """So many requests of a tenant for an adapter (None: the base) were refused for one reason."""

    tenant: str
    adapter: str | None
    code: str
    number: int


class NoteRefusals(msgspec.Struct, frozen=True, tag="note_refusals"):
    """What the service refused before it came here, since the last time. Not answered."""

    refusals: list[Refusals]


class RefusalNotes:
    """Counts; a flood of refusals is one message a beat."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str | None, str], int] = {}

    def note(self, tenant: str, adapter: str | None, code: str) -> None:
        """A request for an adapter (None: the base) was refused."""
        key = tenant, adapter, code
        if key in self._counts or len(self._counts) < MAX_KEYS:
            self._counts[key] = self._counts.get(key, 0) + 1

    def tell(self, send: Callable[[NoteRefusals], bool]) -> None:
        """Send what was counted, and keep it where that fails."""
        if self._counts:
            told = [Refusals(*key, number) for key, number in self._counts.items()]
            if send(NoteRefusals(told)):
                self._counts.clear()
