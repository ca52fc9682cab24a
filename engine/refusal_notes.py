"""What the service refused before the engine heard of it, counted until the engine is told."""

from collections.abc import Callable

import msgspec

MAX_KEYS = 10_000
"""Combinations of tenant, adapter and reason that are counted; further ones are not."""


class Refusals(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many requests of a tenant for an adapter (None: the base) were refused for one reason."""

    tenant: str
    adapter: str | None
    code: str
    number: int


class NoteRefusals(msgspec.Struct, frozen=True, tag="note_refusals"):
    """What the service refused by itself since its last such message. Not answered."""

    refusals: list[Refusals]


class RefusalNotes:
    """Counts refusals, so that a flood of them is only one message for each beat."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str | None, str], int] = {}

    def note(self, tenant: str, adapter: str | None, code: str) -> None:
        """A request for an adapter (None: the base) was refused."""
        key = tenant, adapter, code
        if key in self._counts or len(self._counts) < MAX_KEYS:
            self._counts[key] = self._counts.get(key, 0) + 1

    def tell(self, send: Callable[[NoteRefusals], bool]) -> None:
        """Send what was counted; keep it if that fails."""
        if self._counts:
            told = [Refusals(*key, number) for key, number in self._counts.items()]
            if send(NoteRefusals(told)):
                self._counts.clear()
