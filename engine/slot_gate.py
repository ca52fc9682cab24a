"""Who gets an adapter slot, and at whose expense: reservations, victims and debt.

A queue that lacks only a slot *reserves* one. If a slot is spare (free, or its adapter wanted by
nobody) the load starts at once; when it is done the queue's head goes before all others. If none
is spare the queue *claims* one: a victim is named, the resident adapter with the highest counter,
which admits nothing more, and the claim takes the first slot that becomes spare. Until then
service goes on past the claim. Once more than `debt_limit` tokens were served past it, the
victim's sequences are preempted.

Bounds. At most one claim per tenant and `max(1, num_slots // 4)` in all, first come, first served.
Let U = max(tokens of the longest prompt, output weight x tokens that fit the KV pool), the unit of
the counters' own bound, and D the debt limit. With equal weights, tenants that wait differ by at
most 2U + D plus what is served during one load, and once it is first in order a head waits at
most (claims ahead + 1) x (time to serve D + one load) for its slot.

Reservations of spare slots are not limited: they hold nobody up. And nothing is reserved for an
adapter that is still on its way to host memory: a drained slot would idle while it is fetched.
"""

from dataclasses import dataclass

from engine.adapter_queue import AdapterQueue
from engine.adapter_slots import Adapter, AdapterSlots, SlotState
from engine.running import Running
from engine.tenant import Tenant
from engine.waiting import Waiting


@dataclass(slots=True, eq=False)
class Claim:
    """A queue that waits for a victim's slot."""

    queue: AdapterQueue
    debt: float = 0.0
    """Tokens charged to anyone since, weighted as in the counters."""


class SlotGate:
    """Reservations over the adapter slots. The lists it scans are as long as there are slots."""

    def __init__(
        self, slots: AdapterSlots, waiting: Waiting, running: Running, debt_limit: float
    ) -> None:
        self._slots = slots
        self._waiting = waiting
        self._running = running
        self._debt_limit = debt_limit
        self._max_claims = max(1, slots.num_slots // 4)
        self._claims: dict[Tenant, Claim] = {}
        self._reserved: dict[AdapterQueue, None] = {}  # slot assigned, head not yet admitted
        self._victims: dict[str, None] = {}  # draining; never more than there are claims

    def is_reserved(self, queue: AdapterQueue) -> bool:
        """Whether this queue's head goes before all others, once its slot is ready."""
        return queue in self._reserved

    def first_ready(self) -> AdapterQueue | None:
        """The longest reserved queue whose adapter is resident by now."""
        for queue in self._reserved:
            if queue.adapter and self._slots.state(queue.adapter) is SlotState.RESIDENT:
                return queue
        return None

    def reserve(self, queue: AdapterQueue) -> bool:
        """Reserve a slot for an unplaced queue; False, and no change, if none can be had now."""
        if self._slots.has_spare:
            self._assign(queue)
            return True
        victim = self._choose_victim() if len(self._claims) < self._max_claims else None
        if victim is None:
            return False
        self._claims[queue.tenant] = Claim(queue)
        queue.tenant.has_claim = True
        self._waiting.unplaced.hide(queue.tenant)
        self._set_claimed(queue, True)
        self._victims[victim.digest] = None
        self._slots.drain(victim.digest)
        self._waiting.refile(victim.digest)
        self.settle()
        return True

    def settle(self) -> None:
        """Give spare slots to claims, the oldest first, and spare the victims no longer needed."""
        for digest in list(self._victims):
            if self._slots.state(digest) is not SlotState.DRAINING:
                del self._victims[digest]  # its last sequence has left
        while self._claims and self._slots.has_spare:
            claim = next(iter(self._claims.values()))
            self._drop_claim(claim.queue.tenant)
            self._assign(claim.queue)
        while len(self._victims) > len(self._claims):
            digest, _ = self._victims.popitem()
            self._slots.stop_draining(digest)
            self._waiting.refile(digest)

    def lend(self, num_tokens: float) -> None:
        """Service went past all claims."""
        for claim in self._claims.values():
            claim.debt += num_tokens

    def overdue_victim(self) -> str | None:
        """The adapter whose sequences are to be preempted now, if any."""
        for claim in self._claims.values():
            if claim.debt > self._debt_limit:
                return next(iter(self._victims))
            break  # later claims owe less
        return None

    def served(self, queue: AdapterQueue) -> None:
        """The head of a queue was admitted."""
        self._reserved.pop(queue, None)

    def cancel(self, queue: AdapterQueue) -> None:
        """A queue became empty, or its tenant's quota holds it back."""
        self._reserved.pop(queue, None)
        claim = self._claims.get(queue.tenant)
        if claim is not None and claim.queue is queue:
            self._drop_claim(queue.tenant)
            self.settle()

    def cancel_tenant(self, tenant: Tenant) -> None:
        """A quota holds a tenant back."""
        claim = self._claims.get(tenant)
        queues = [queue for queue in self._reserved if queue.tenant is tenant]
        for queue in queues if claim is None else [*queues, claim.queue]:
            self.cancel(queue)

    def _assign(self, queue: AdapterQueue) -> None:
        assert queue.adapter is not None
        self._slots.assign(queue.adapter)
        self._reserved[queue] = None
        self._waiting.refile(queue.adapter)

    def _drop_claim(self, tenant: Tenant) -> None:
        claim = self._claims.pop(tenant)
        tenant.has_claim = False
        self._set_claimed(claim.queue, False)
        self._waiting.show(tenant)

    def _set_claimed(self, queue: AdapterQueue, is_claimed: bool) -> None:
        assert queue.adapter is not None
        adapter = self._slots.find(queue.adapter)
        if adapter is not None:
            adapter.is_claimed = is_claimed
            self._waiting.refile(queue.adapter)

    def _choose_victim(self) -> Adapter | None:
        reserved = {queue.adapter for queue in self._reserved}
        candidates = [
            adapter
            for adapter in self._slots.placed
            if adapter.state is SlotState.RESIDENT and adapter.digest not in reserved
        ]
        return max(candidates, key=self._service, default=None)

    def _service(self, adapter: Adapter) -> tuple[float, float, int]:
        """How much an adapter was served: as its least served queue; ties: what ends soonest."""
        counter = min(
            (queue.tenant.counter, queue.counter)
            for queue in self._waiting.queues_of(adapter.digest)
        )
        return (*counter, -self._running.tokens_left(adapter.digest))

    def check_integrity(self) -> None:
        """Raise AssertionError if claims, victims and reservations disagree with the slots."""
        assert len(self._claims) <= self._max_claims, "too many claims"
        assert len(self._victims) == len(self._claims), "not one victim for each claim"
        draining = {a.digest for a in self._slots.placed if a.state is SlotState.DRAINING}
        assert draining == set(self._victims), "draining adapters are not the victims"
        for tenant, claim in self._claims.items():
            assert claim.queue.tenant is tenant and tenant.has_claim and claim.queue, "stale claim"
            assert not tenant.is_held, "a held tenant's claim"
        for queue in self._reserved:
            assert queue and queue.adapter, "a reservation for an empty queue"
            assert self._slots.state(queue.adapter) in (SlotState.LOADING, SlotState.RESIDENT)
