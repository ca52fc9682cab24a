"""Everything that waits: tenants and their queues, kept in the orders of `standing.py`."""

import math

from engine.messages import EngineRequest
from engine.scheduling.adapter_queue import AdapterQueue
from engine.scheduling.adapter_slots import AdapterSlots, SlotState
from engine.scheduling.backpressure import Pressure
from engine.scheduling.fairness import Contenders
from engine.scheduling.sequence import Sequence
from engine.scheduling.standing import Standing
from engine.scheduling.step_clock import StepClock
from engine.scheduling.tenant import Tenant, is_idle_queue, is_idle_tenant
from engine.scheduling.wait_causes import WaitCause, add_wait


class Waiting:
    """Owns tenants and queues; operations are O(log queues), `apply_slot_quota` is O(slots)."""

    def __init__(self, slots: AdapterSlots, time: StepClock) -> None:
        self._standing = Standing(slots)
        self.ready = self._standing.ready
        self.resuming = self._standing.resuming
        self.unplaced = self._standing.unplaced
        self.unfetched = self._standing.unfetched
        self.tenants: dict[str, Tenant] = {}
        self.num_waiting = 0
        """Sequences in all queues."""
        self.pressure = Pressure(time.now)
        self._slots = slots
        self._time = time
        self._contenders = Contenders[Tenant](is_idle_tenant)
        self._queues_of: dict[str, dict[AdapterQueue, None]] = {}
        self._stopped: AdapterQueue | None = None
        self._stop_cause: WaitCause = "budget"

    @property
    def floor(self) -> float:
        """The counter of the least served tenant that waits and that no quota holds back."""
        return self._contenders.floor

    @property
    def stopped(self) -> AdapterQueue | None:
        """The queue at whose head admission stopped, in this step or else in the last one."""
        return self._stopped

    def queue_of(self, message: EngineRequest) -> AdapterQueue:
        """The queue for a request; its tenant takes over the request's weight and limits."""
        tenant = self.tenants.get(message.tenant)
        if tenant is None:
            tenant = self.tenants[message.tenant] = Tenant(message.tenant, self._time.now)
        tenant.weight = message.weight
        tenant.max_concurrent = message.max_concurrent
        tenant.max_slots = message.max_slots
        queue = tenant.queues.get(message.adapter)
        if queue is None:
            queue = AdapterQueue(tenant, message.adapter, cause="turn", now=self._time.now)
            tenant.queues[message.adapter] = queue
            if message.adapter is not None:
                self._queues_of.setdefault(message.adapter, {})[queue] = None
        if message.adapter is None or is_idle_queue(queue):
            queue.label = message.label
        elif queue.label != message.label:
            queue.label = None
        return queue

    def queues_of(self, adapter: str) -> list[AdapterQueue]:
        """All queues of an adapter, over all tenants, that wait or run."""
        queues = self._queues_of.get(adapter, ())
        return [queue for queue in queues if not is_idle_queue(queue)]

    def seconds_waited(self, sequence: Sequence) -> float:
        """Seconds that a waiting sequence has waited since it was last queued."""
        now = sequence.request.queue.ledger.read(self._time.now)
        return (sum(now) - sum(sequence.wait_began)) / 1e9

    def push(self, sequence: Sequence, *, first: bool = False) -> None:
        """Queue a sequence: a new one last, a preempted one first."""
        queue = sequence.request.queue
        tenant = queue.tenant
        if not queue:
            # While it is still empty: an empty queue has a cause too, and the wait begins with it.
            self._note_cause(queue)
            queue.pressure.begin(self._time.now)
        if not tenant.num_waiting:
            tenant.pressure.begin(self._time.now)
        if not self.num_waiting:
            self.pressure.begin(self._time.now)
        tenant.contenders.enter(queue)
        if not tenant.is_held:
            self._contenders.enter(tenant)
        if first:
            queue.append_first(sequence)
        else:
            queue.append(sequence)
        tenant.num_waiting += 1
        self.num_waiting += 1
        sequence.wait_began = queue.ledger.read(self._time.now)
        self._file(queue, has_older_head=first)

    def take(self, sequence: Sequence) -> None:
        """Take out a sequence that is admitted or over, and book its wait."""
        queue = sequence.request.queue
        tenant = queue.tenant
        now = queue.ledger.read(self._time.now)
        for total in (sequence.request.waited, queue.waited):
            add_wait(total, sequence.wait_began, now)
        queue.remove(sequence)
        tenant.num_waiting -= 1
        self.num_waiting -= 1
        for pressure in (queue.pressure, tenant.pressure, self.pressure):
            pressure.leave(self._time.now)
        self._file(queue)  # its next head may resume where this one did not, or the reverse
        if not queue:
            tenant.contenders.leave(queue)
            if self._stopped is queue:
                self._stopped = None
        if not tenant.num_waiting:
            self._contenders.leave(tenant)

    def rest(self, queue: AdapterQueue) -> None:
        """A sequence of this queue ended: forget idle queues and tenants that no longer matter.

        They matter for as long as their counters are above the floor of those that wait.
        """
        if is_idle_queue(queue):
            queue.tenant.contenders.rest(queue)
            if is_idle_tenant(queue.tenant):
                self._contenders.rest(queue.tenant)
        for tenant in self._contenders.forgettable():
            for idle in tenant.queues.values():
                self._unlist(idle)
            tenant.queues.clear()
            del self.tenants[tenant.name]
        for idle in queue.tenant.contenders.forgettable():
            if queue.tenant.queues.get(idle.adapter) is idle:
                self._unlist(idle)
                del queue.tenant.queues[idle.adapter]

    def hold(self, tenant: Tenant) -> None:
        """A quota holds back all queues of a tenant: they are not offered, nor set the floor."""
        tenant.hold_clock.turn(True, self._time.now)
        tenant.slotless_clock.turn(True, self._time.now)
        self._contenders.leave(tenant)
        for order in self._standing.orders:
            order.hide(tenant)

    def reopen(self, tenant: Tenant) -> None:
        """The quota no longer holds the tenant back, which counts as an arrival."""
        tenant.hold_clock.turn(False, self._time.now)
        tenant.slotless_clock.turn(tenant.is_out_of_slots, self._time.now)
        if tenant.num_waiting:
            self._contenders.enter(tenant)
        self.show(tenant)

    def show(self, tenant: Tenant) -> None:
        """Offer a tenant's queues where nothing forbids it."""
        for order in self._standing.orders:
            if not self._standing.is_hidden(tenant, order):
                order.show(tenant)

    def apply_slot_quota(self, tenant: Tenant, slack: float) -> bool:
        """The slots that a tenant holds changed: keep its other adapters out, or offer them again.

        O(1) for a tenant without that quota, else O(slots). While the tenant is out of slots, an
        adapter of it that is more than `slack` tokens ahead of a waiting one admits nothing more,
        until that one had its turn. Returns whether a slot was given up because only queues that
        the quota keeps out wanted it.
        """
        if tenant.max_slots is None and not tenant.is_out_of_slots:
            return False
        is_out = not tenant.has_slots_left
        if is_out is not tenant.is_out_of_slots:
            tenant.is_out_of_slots = is_out
            tenant.slotless_clock.turn(tenant.is_held or is_out, self._time.now)
            for order in (self.unplaced, self.unfetched):
                if self._standing.is_hidden(tenant, order):
                    order.hide(tenant)
                else:
                    order.show(tenant)
        placed = [
            queue
            for adapter in self._slots.placed
            if (queue := tenant.queues.get(adapter.digest)) is not None
        ]
        if is_out:
            self._set_yielding(tenant, placed, slack)
        for queue in placed:
            self._file(queue)
        self._count(tenant, placed)
        has_given_up = False
        for queue in placed if is_out else ():
            if self._standing.is_kept_out(queue) and self._is_useless(queue):
                self._slots.give_up(queue.adapter or "")
                self.refile(queue.adapter or "")
                has_given_up = True
        return has_given_up

    def _count(self, tenant: Tenant, placed: list[AdapterQueue]) -> None:
        """Let the tenant compete with others, unless its quotas hold back all its queues."""
        if not tenant.num_waiting or tenant.is_held:
            return
        open_queues = [tenant.queues.get(None), tenant.reserved, *placed]
        if not tenant.is_out_of_slots or any(
            queue and not self._standing.is_kept_out(queue) for queue in open_queues
        ):
            self._contenders.enter(tenant)
        else:
            self._contenders.leave(tenant)

    def _is_useless(self, queue: AdapterQueue) -> bool:
        """Whether the queue's adapter is resident, but nobody may use its slot now."""
        adapter = self._slots.find(queue.adapter or "")
        return (
            adapter is not None
            and adapter.state is SlotState.RESIDENT
            and not adapter.references
            and not adapter.is_pinned
            and all(self._standing.is_kept_out(other) for other in self.queues_of(adapter.digest))
        )

    def _set_yielding(self, tenant: Tenant, placed: list[AdapterQueue], slack: float) -> None:
        kept_out = [
            first
            for order in (self.unplaced, self.unfetched)
            if (first := order.first_of(tenant)) is not None
        ]
        kept_out += (q for q in placed if q and not q.num_running and q is not tenant.reserved)
        lowest = min((queue.counter for queue in kept_out), default=math.inf)
        for queue in placed:
            queue.is_yielding = bool(queue.num_running) and queue.counter > lowest + slack

    def refile(self, adapter: str) -> None:
        """An adapter's state changed: move its queues to the orders they belong to now."""
        for queue in self._queues_of.get(adapter, ()):
            self._file(queue)

    def stop_at(self, queue: AdapterQueue | None, cause: WaitCause) -> None:
        """Admission stopped at the head of this queue for want of `kv` or `budget`."""
        stopped_before, self._stopped, self._stop_cause = self._stopped, queue, cause
        for changed in (stopped_before, queue):
            if changed is not None:
                self._note_cause(changed)

    def _file(self, queue: AdapterQueue, *, has_older_head: bool = False) -> None:
        order = self._standing.order_of(queue) if queue else None
        if queue.order is not None and queue.order is not order:
            queue.order.discard(queue)
        if order is not None and (queue.order is not order or has_older_head):
            order.push(queue, hidden=self._standing.is_hidden(queue.tenant, order))
        queue.order = order
        self._note_cause(queue)

    def _note_cause(self, queue: AdapterQueue) -> None:
        tenant = queue.tenant
        has_slot = queue is tenant.reserved or not self._standing.is_slotless(queue)
        clock = tenant.hold_clock if has_slot else tenant.slotless_clock
        queue.ledger.change(self._cause_of(queue), self._time.now, clock)

    def _cause_of(self, queue: AdapterQueue) -> WaitCause:
        stop_cause = self._stop_cause if queue is self._stopped else "turn"
        return self._standing.cause_of(queue, stop_cause)

    def _unlist(self, queue: AdapterQueue) -> None:
        if queue.adapter is not None:
            queues = self._queues_of[queue.adapter]
            del queues[queue]
            if not queues:
                del self._queues_of[queue.adapter]

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, indices and causes disagree."""
        order_of = self._standing.order_of
        for tenant in self.tenants.values():
            queues = tenant.queues.values()
            assert tenant.num_waiting == sum(len(queue) for queue in queues), tenant.name
            assert not tenant.is_held or tenant.num_running, f"{tenant.name}: held while idle"
            assert tenant.is_out_of_slots is not tenant.has_slots_left, f"{tenant.name}: slots"
            assert tenant.slotless_clock.is_held is (tenant.is_held or tenant.is_out_of_slots)
            for queue in queues:
                assert queue.order is (order_of(queue) if queue else None), "misfiled"
                assert queue.order is None or queue in queue.order, "not in its order"
                assert not queue or queue.ledger.cause == self._cause_of(queue), "wrong cause"
                if queue.adapter is not None:
                    assert queue in self._queues_of[queue.adapter], "unlisted queue"
        assert self.num_waiting == sum(t.num_waiting for t in self.tenants.values())
        assert sum(map(len, self._queues_of.values())) == sum(
            queue.adapter is not None for t in self.tenants.values() for queue in t.queues.values()
        ), "a forgotten queue is listed"
