"""Where a queue of waiting sequences stands: in which order of service, and why its head waits.

A queue that is not empty is in one of five places:

- *ready*: its head may be admitted now;
- *resuming*: likewise, and its head was preempted for its blocks;
- *unplaced*: its adapter is in host memory and wants a slot;
- *unfetched*: its adapter is not in host memory, and its source was not told to hurry;
- parked: what it waits for is on its way.

All but the last are indices in the order of service, so that a step looks at what it may serve and
never at everything that waits.
"""

from engine.scheduling.adapter_queue import AdapterQueue
from engine.scheduling.adapter_slots import AdapterSlots, SlotState
from engine.scheduling.fair_order import FairOrder
from engine.scheduling.tenant import Tenant
from engine.scheduling.wait_causes import WaitCause


class Standing:
    """Owns the four orders, and says which one a queue belongs to; `Waiting` moves queues."""

    def __init__(self, slots: AdapterSlots) -> None:
        self.ready = FairOrder()
        self.resuming = FairOrder()
        self.unplaced = FairOrder()
        self.unfetched = FairOrder()
        self.orders = (self.ready, self.resuming, self.unplaced, self.unfetched)
        self._slots = slots

    def order_of(self, queue: AdapterQueue) -> FairOrder | None:
        """The order that a queue that is not empty belongs to.

        None where it is parked, or where its tenant's quota of slots keeps it out.
        """
        adapter = None if queue.adapter is None else self._slots.find(queue.adapter)
        if adapter is None or adapter.state is SlotState.RESIDENT:
            if self.is_kept_out(queue):
                return None
            return self.resuming if queue.head.is_resuming else self.ready
        if adapter.state is not SlotState.ABSENT or adapter.is_claimed:
            return None
        if adapter.is_fetched:
            return self.unplaced
        return None if adapter.is_hastened else self.unfetched

    def is_hidden(self, tenant: Tenant, order: FairOrder) -> bool:
        """Whether an order must not offer a tenant's queues now."""
        if order is self.unplaced:
            return tenant.is_held or tenant.is_out_of_slots or tenant.has_reservation
        if order is self.unfetched:
            return tenant.is_held or tenant.is_out_of_slots or tenant.is_hastening
        return tenant.is_held

    def cause_of(self, queue: AdapterQueue, stop_cause: WaitCause) -> WaitCause:
        """Why a queue's head waits; `stop_cause` if nothing but admission keeps it waiting."""
        adapter = None if queue.adapter is None else self._slots.find(queue.adapter)
        has_slot = adapter is not None and adapter.state is not SlotState.ABSENT
        if has_slot and self.is_kept_out(queue):
            return "quota"
        if adapter is not None and adapter.state is not SlotState.RESIDENT:
            is_coming = adapter.state is SlotState.LOADING or (
                adapter.state is SlotState.ABSENT and not adapter.is_fetched
            )
            return "load" if is_coming else "slot"
        return stop_cause

    def is_slotless(self, queue: AdapterQueue) -> bool:
        """Whether a queue's adapter has no slot, and none coming."""
        adapter = None if queue.adapter is None else self._slots.find(queue.adapter)
        return adapter is not None and adapter.state is SlotState.ABSENT

    def is_kept_out(self, queue: AdapterQueue) -> bool:
        """Whether the quota of slots keeps a queue from the slot that its adapter has."""
        return bool(queue) and not queue.tenant.may_use_slot(queue)
