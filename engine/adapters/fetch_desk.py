"""Which client was asked for which adapter's files.

One client at a time is asked for an adapter; if it does not answer, the next one is.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

ANSWER_SECONDS = 60.0
"""A client that has not answered for so long is passed over for another."""


@dataclass(slots=True)
class _Fetch:
    client: bytes | None = None
    deadline: float = 0.0
    asked: set[bytes] = field(default_factory=set[bytes])
    """Clients that had their turn; when all have had it, they may be asked again."""


class FetchDesk:
    """Open fetches by digest; while there is no client, they stay open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fetches: dict[str, _Fetch] = {}

    @property
    def num_open(self) -> int:
        """Adapters that somebody was or will be asked for."""
        return len(self._fetches)

    def need(self, digest: str) -> None:
        """Open a fetch; harmless if it is open."""
        self._fetches.setdefault(digest, _Fetch())

    def close(self, digest: str) -> None:
        """The files are there, or nobody needs them any more."""
        self._fetches.pop(digest, None)

    def is_asked(self, client: bytes, digest: str) -> bool:
        """Whether this client is the one asked now; a late failure of another one is ignored."""
        fetch = self._fetches.get(digest)
        return fetch is not None and fetch.client == client

    def client_gone(self, client: bytes) -> None:
        """A client is gone: ask others for what it was asked for."""
        for fetch in self._fetches.values():
            fetch.asked.discard(client)
            if fetch.client == client:
                fetch.client = None

    def assign(self, clients: Collection[bytes]) -> list[tuple[bytes, str]]:
        """(client, digest) pairs to ask now, where nobody was asked or no answer came in time.

        Takes the client with the fewest open fetches among those not asked for that adapter yet.
        """
        if not self._fetches or not clients:
            return []
        now = self._clock()
        load = dict.fromkeys(clients, 0)
        for fetch in self._fetches.values():
            if fetch.client in load:
                load[fetch.client] += 1
        asked: list[tuple[bytes, str]] = []
        for digest, fetch in self._fetches.items():
            if fetch.client is not None and now < fetch.deadline:
                continue
            candidates = [client for client in clients if client not in fetch.asked]
            if not candidates:
                fetch.asked.clear()
                candidates = list(clients)
            client = min(candidates, key=load.__getitem__)
            load[client] += 1
            fetch.client = client
            fetch.deadline = now + ANSWER_SECONDS
            fetch.asked.add(client)
            asked.append((client, digest))
        return asked
