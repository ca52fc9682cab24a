"""One client as the engine knows it."""

import secrets
from dataclasses import dataclass, field

SILENCE_SECONDS = 2.0
"""A client that is silent for this long is gone; it beats twice a second."""


def _draw_session() -> int:
    return secrets.randbits(62) + 1


@dataclass(slots=True)
class Peer:
    """A client; one that was dropped and comes back is a new peer with a new session."""

    client: bytes
    last_heard: float
    session: int = field(default_factory=_draw_session)
    live: set[int] = field(default_factory=set[int])
    """Its requests that are queued or running."""
    has_left: bool = False
    """It has said goodbye."""

    @property
    def silent_at(self) -> float:
        """When it will count as gone, unless it is heard before."""
        return self.last_heard + SILENCE_SECONDS
