"""Who gets an adapter slot, and at whose expense: reservations, claims and victims.

A queue that lacks only a slot makes a *reservation*. If a slot is spare (free, or held by an
adapter that nobody needs), its load starts at once. Otherwise the reservation is a *claim*: it
names a victim, which admits no more sequences, and it gets the first slot that becomes spare.

- The victim is the most served resident adapter; if slots are all that is short, it is the adapter
  whose pause is felt least (see `slot_victims.py`).
- While a claim waits, service goes on past it. Once the claim is overdue (see `slot_debt.py`), the
  victim's sequences are preempted. If the engine has time to spare, that happens earlier, but only
  after each of them has drawn a stint of tokens.
- When the weights are in the slot, the queue's head is admitted before all others. That ends the
  reservation.

A tenant has one reservation at a time. There are at most `max(1, num_slots // 4)` claims, served in
the order in which they were made. docs/scheduler.md states as formulas what this promises.

A pinned adapter keeps its slot: it is never a victim. While it has none it takes the first spare
slot that no claim waits for, whether or not anybody wants it. Otherwise it is like the rest.

An adapter that is still on its way to host memory gets no reservation, or the slot drained for it
would idle during the fetch. If such an adapter is first in order, its source is told to hurry. That
holds for one adapter of each tenant, and for as many in all as there are slots, which bounds host
memory.
"""

from collections.abc import Set
from dataclasses import dataclass

from engine.scheduling.adapter_queue import AdapterQueue
from engine.scheduling.adapter_slots import Adapter, AdapterSlots, SlotState
from engine.scheduling.slot_debt import Account, SlotDebt
from engine.scheduling.slot_victims import SlotVictims
from engine.scheduling.tenant import Tenant
from engine.scheduling.waiting import Waiting

IDLE_LOADS = 3
"""While half of the seats are free, a claim is due after this many load times (on a CPU a load
takes one step). Simulated with 8 slots, at half of the request rate that saturates an engine with a
slot for every adapter: the p99 time to first token, relative to that engine's, is 3.2 for 16
adapters and 4.2 for 64 (Zipf popularity, eight seeds). With a value of 4 it is 3.4 and 5.3, and
without slots going round 7.5 and 9.9."""

STINT_LOADS = 8
"""Before a slot goes round, each of its sequences draws this many tokens for every step that a load
takes, and one more for every block that will be computed again. So loading and recomputing take
only a small share of a slot's time."""

OUTLIER = 16
"""A load counts as at most this many times the average. One that had to wait for its files says
little about the next ones, and would keep slots from going round for a long time."""


@dataclass(slots=True, eq=False)
class Reservation:
    """A queue that waits for its slot, or whose slot waits for its head."""

    queue: AdapterQueue
    digest: str
    account: Account | None = None
    """While it is a claim: the service that was lent past it."""
    placed_in: int = 0
    """Once it has a slot: the number of the step in which it got it."""


class SlotGate:
    """Grants, drains and reserves the adapter slots. Every scan is O(slots)."""

    def __init__(
        self,
        slots: AdapterSlots,
        waiting: Waiting,
        debt_limit: float,
        victims: SlotVictims,
    ) -> None:
        """`debt_limit`: tokens of service lent past a claim before its victim is preempted."""
        self._slots = slots
        self._waiting = waiting
        self._choice = victims
        self._debt = SlotDebt(debt_limit)
        self._slack = debt_limit
        self._max_claims = max(1, slots.num_slots // 4)
        self._num_steps = 0
        self._load_steps = 1.0  # from a slot to its head's admission, on average
        self._claims: dict[Tenant, Reservation] = {}  # without a slot so far, the oldest first
        self._placed: dict[Tenant, Reservation] = {}  # with one that loads, or waits for its head
        self._victims: dict[str, None] = {}  # draining; as many as there are claims
        self._hastened: dict[Tenant, str] = {}  # fetched before others, and without a slot so far

    @property
    def can_hasten(self) -> bool:
        """Whether one more adapter may be fetched before others."""
        return len(self._hastened) < self._slots.num_slots

    def is_reserved(self, queue: AdapterQueue) -> bool:
        """Whether this queue's head goes before all others, once its slot is ready."""
        reservation = self._placed.get(queue.tenant)
        return reservation is not None and reservation.queue is queue

    def first_ready(self) -> AdapterQueue | None:
        """The queue whose adapter is resident by now and whose reservation is the oldest."""
        for reservation in self._placed.values():
            if self._slots.state(reservation.digest) is SlotState.RESIDENT:
                return reservation.queue
        return None

    def stint(self, num_lost_blocks: int = 0) -> int:
        """Tokens that a sequence draws after its admission before it is preempted for its slot.

        At least one, or two adapters could recompute their prompts in turn for ever.
        `num_lost_blocks` counts the full blocks of all the victim's sequences that the prefix
        cache does not keep.
        """
        if self._debt.is_overdue:
            return 1
        return max(1, int(STINT_LOADS * self._load_steps)) + num_lost_blocks

    @property
    def is_crowded(self) -> bool:
        """Whether more tenants ask for a slot than half the number of slots.

        A round would then take so long that letting slots go round makes all of them wait longer.
        """
        num_asking = self._waiting.unplaced.num_offered + len(self._claims)
        return num_asking > max(1, self._slots.num_slots // 2)

    @property
    def oldest_claim(self) -> AdapterQueue | None:
        """The queue that gets the next slot that becomes spare."""
        claim = next(iter(self._claims.values()), None)
        return None if claim is None else claim.queue

    def reserve(self, queue: AdapterQueue, *, has_room: bool = False) -> bool:
        """Reserve a slot for an unplaced queue; False, and no change, if none can be had now.

        `has_room`: whether a seat and blocks are free for its head.
        """
        victim: Adapter | None = None
        if not self._slots.has_spare:
            if len(self._claims) < self._max_claims:
                victim = self._victim_of(queue, has_room=has_room)
            if victim is None:
                return False
        assert queue.adapter is not None
        self._claims[queue.tenant] = Reservation(queue, queue.adapter, self._debt.open())
        queue.tenant.reserved = queue
        self._waiting.unplaced.hide(queue.tenant)
        self._set_claimed(queue.adapter, True)
        if victim is not None:
            self._slots.tell("reserved", queue.adapter, victim.slot)
            self._drain(victim)
        self._waiting.apply_slot_quota(queue.tenant, self._slack)  # it may give the victim's up
        self.settle()
        return True

    def place_early(self) -> None:
        """Give spare slots away between steps, as the next step would, so that it need not.

        Does nothing while somebody could be admitted: a queue whose slot is ready goes before all
        others, and must not overtake those.
        """
        waiting = self._waiting
        while waiting.ready.min() is None and waiting.resuming.min() is None:
            queue = waiting.unplaced.min() if self._slots.has_spare else None
            if queue is None:
                return
            self.reserve(queue)

    def hasten(self, queue: AdapterQueue) -> None:
        """An unfetched queue is first in order: tell its adapter's source to hurry."""
        assert queue.adapter is not None
        self._hastened[queue.tenant] = queue.adapter
        queue.tenant.is_hastening = True
        self._waiting.unfetched.hide(queue.tenant)
        self._slots.hasten(queue.adapter)
        self._waiting.refile(queue.adapter)

    def pin(self, digests: Set[str]) -> None:
        """These adapters, and no others, keep their slots from now on, or get one."""
        for digest in [victim for victim in self._victims if victim in digests]:
            del self._victims[digest]
            self._slots.stop_draining(digest)
            self._waiting.refile(digest)
        self._slots.pin(digests)
        self.settle()
        while len(self._victims) < len(self._claims):
            victim = self._choice.most_served(self._reserved)
            if victim is None:
                self.release_tenant(next(reversed(self._claims)))
            else:
                self._drain(victim)
        self.settle()

    def settle(self) -> None:
        """Bring slots and reservations in line after any change.

        Spare slots go to claims, the oldest first, then to pinned adapters; victims that are no
        longer needed stop draining.
        """
        for digest in list(self._victims):
            if self._slots.state(digest) is not SlotState.DRAINING:
                del self._victims[digest]  # its last sequence has left
        while self._claims and self._slots.has_spare:
            tenant = next(iter(self._claims))
            claim = self._placed[tenant] = self._end_claim(tenant)
            claim.placed_in = self._num_steps
            self._slots.assign(claim.digest)
            self._set_claimed(claim.digest, False)
        while self._slots.has_spare and (pinned := self._slots.next_pinned()) is not None:
            self._slots.assign(pinned)
            self._waiting.refile(pinned)
        while len(self._victims) > len(self._claims):
            digest, _ = self._victims.popitem()
            self._slots.stop_draining(digest)
            self._waiting.refile(digest)
        for tenant, digest in list(self._hastened.items()):
            adapter = self._slots.find(digest)
            if adapter is None or not adapter.is_hastened:
                del self._hastened[tenant]
                tenant.is_hastening = False
                self._waiting.show(tenant)

    def lend(self, tenant: Tenant, num_tokens: float) -> None:
        """Tokens were charged to a tenant, past all claims."""
        self._debt.lend(tenant.name, num_tokens)

    def begin_step(self, *, is_idle: bool) -> None:
        """Count a step. `is_idle`: the oldest claim lacks only a slot, and time is to spare."""
        self._num_steps += 1
        if is_idle:
            self._debt.waste(1 / (IDLE_LOADS * self._load_steps))

    def loaded(self, digest: str) -> None:
        """An adapter's weights are in its slot: note how many steps the load took."""
        for reservation in self._placed.values():
            if reservation.digest == digest:
                num_steps = self._num_steps - reservation.placed_in + 1
                counted = min(num_steps, OUTLIER * self._load_steps)
                self._load_steps += (counted - self._load_steps) / 8

    def due_victim(self) -> str | None:
        """The adapter whose sequences are to be preempted, once each has drawn its `stint`."""
        is_due = self._debt.is_due or self._debt.is_overdue
        return next(iter(self._victims)) if is_due else None

    def release(self, queue: AdapterQueue) -> None:
        """End this queue's reservation, if it has one.

        Its head was admitted, it is empty, or its tenant's quota holds it back.
        """
        for reservations in (self._claims, self._placed):
            reservation = reservations.get(queue.tenant)
            if reservation is not None and reservation.queue is queue:
                self.release_tenant(queue.tenant)

    def release_tenant(self, tenant: Tenant) -> None:
        """End the tenant's reservation, whichever of its queues has one."""
        if not tenant.has_reservation:
            return
        tenant.reserved = None
        if tenant in self._claims:
            self._set_claimed(self._end_claim(tenant).digest, False)
            self.settle()
        else:
            del self._placed[tenant]
        self.apply_quota(tenant)
        self._waiting.show(tenant)

    def apply_quota(self, tenant: Tenant) -> None:
        """The slots that a tenant holds changed; see `Waiting.apply_slot_quota`."""
        if self._waiting.apply_slot_quota(tenant, self._slack):
            self.settle()

    def _end_claim(self, tenant: Tenant) -> Reservation:
        claim = self._claims.pop(tenant)
        assert claim.account is not None
        self._debt.close(claim.account)
        claim.account = None
        return claim

    def _drain(self, victim: Adapter) -> None:
        self._victims[victim.digest] = None
        self._slots.drain(victim.digest)
        self._waiting.refile(victim.digest)

    def _set_claimed(self, digest: str, is_claimed: bool) -> None:
        adapter = self._slots.find(digest)
        if adapter is not None:
            adapter.is_claimed = is_claimed
            self._waiting.refile(digest)

    def _victim_of(self, queue: AdapterQueue, *, has_room: bool) -> Adapter | None:
        reserved = self._reserved
        victim = self._choice.most_served(reserved)
        if victim is None or not has_room:
            return victim
        # One slot serves as many as there are seats: whoever had much with it is not spared.
        most = self._choice.service_of(victim)[0]
        is_far_ahead = most > queue.tenant.counter + self._slack
        return victim if is_far_ahead else self._choice.least_felt(reserved, self.stint())

    @property
    def _reserved(self) -> set[str]:
        """Adapters whose slot waits for the head it was reserved for."""
        return {reservation.digest for reservation in self._placed.values()}

    def check_integrity(self) -> None:
        """Raise AssertionError if reservations and victims disagree with the slots."""
        assert len(self._claims) <= self._max_claims, "too many claims"
        assert len(self._victims) == len(self._claims), "not one victim for each claim"
        draining = {a.digest for a in self._slots.placed if a.state is SlotState.DRAINING}
        assert draining == set(self._victims), "draining adapters are not the victims"
        assert not self._slots.has_spare or self._slots.next_pinned() is None, "a pin waits"
        assert not self._claims.keys() & self._placed.keys(), "two reservations of one tenant"
        for reservations, states in (
            (self._claims, (SlotState.ABSENT,)),
            (self._placed, (SlotState.LOADING, SlotState.RESIDENT)),
        ):
            for tenant, reservation in reservations.items():
                assert reservation.queue.tenant is tenant and tenant.has_reservation
                assert reservation.queue and not tenant.is_held, "a stale reservation"
                assert self._slots.state(reservation.digest) in states
        for tenant, digest in self._hastened.items():
            adapter = self._slots.find(digest)
            assert tenant.is_hastening and adapter is not None and adapter.is_hastened
