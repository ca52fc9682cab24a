"""Which of many replicas gets a request.

By affinity: an adapter's requests go to the first replica of its own order that is not too busy.
The order is by rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase
hit rates", 1998), so that a new replica takes only its share of adapters from the others; "too
busy" is more than `SLACK` times the mean (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing
with bounded loads", SODA 2018), so that a popular adapter spreads over as many as it needs.

Load is what was sent, in tokens, forgotten at a rate of 1 / `MEMORY_SECONDS` (forward decay:
Cormode et al., ICDE 2009). A router needs no word from the replicas for that, so that any number
of them, in as many processes, decide alike.
"""

import math
from collections.abc import Callable
from hashlib import blake2b
from typing import Literal

Routing = Literal["affinity", "round_robin"]
ROUTINGS: tuple[Routing, ...] = ("affinity", "round_robin")
Route = Callable[[float, str | None, float], int]
"""From the time, the adapter and the tokens of a request to a replica. Times never fall."""

SLACK = 1.25
MEMORY_SECONDS = 10.0
LIGHT_LOAD = 20_000.0
"""Tokens in that time with which a replica is never too busy: few requests are no imbalance."""
_LARGEST_EXPONENT = 400.0


def make_route(routing: Routing, num_replicas: int) -> Route:
    """A router of its own, with nothing sent so far."""
    if num_replicas < 1:
        raise ValueError(f"there must be at least one replica, not {num_replicas}")
    if routing == "affinity":
        return AffinityRouter(num_replicas)
    return _RoundRobin(num_replicas)


class AffinityRouter:
    """Rendezvous hashing with bounded loads. Requests for the base go where the load is least."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._orders: dict[str, tuple[int, ...]] = {}
        self._loads = [0.0] * num_replicas
        self._total = 0.0
        self._start = 0.0

    def __call__(self, now: float, adapter: str | None, num_tokens: float) -> int:
        """See `Route`."""
        exponent = (now - self._start) / MEMORY_SECONDS
        if exponent > _LARGEST_EXPONENT:
            faded = math.exp(-exponent)
            self._loads = [load * faded for load in self._loads]
            self._total *= faded
            self._start, exponent = now, 0.0
        weight = math.exp(exponent)
        added = num_tokens * weight
        replica = self._choose(adapter, added, LIGHT_LOAD * weight)
        self._loads[replica] += added
        self._total += added
        return replica

    def order(self, adapter: str) -> tuple[int, ...]:
        """All replicas, the adapter's own first."""
        order = self._orders.get(adapter)
        if order is None:
            scores = [_score(adapter, replica) for replica in range(self._num_replicas)]
            order = tuple(sorted(range(self._num_replicas), key=scores.__getitem__, reverse=True))
            self._orders[adapter] = order
        return order

    def _choose(self, adapter: str | None, added: float, light: float) -> int:
        loads = self._loads
        if adapter is None:
            return loads.index(min(loads))
        most = max(light, SLACK * (self._total + added) / self._num_replicas)
        order = self.order(adapter)
        for replica in order:
            if loads[replica] + added <= most:
                return replica
        return min(order, key=loads.__getitem__)  # a huge request


class _RoundRobin:
    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = 0

    def __call__(self, now: float, adapter: str | None, num_tokens: float) -> int:
        replica = self._next
        self._next = (replica + 1) % self._num_replicas
        return replica


def _score(adapter: str, replica: int) -> bytes:
    return blake2b(f"{replica} {adapter}".encode(), digest_size=8).digest()
