"""Waiting queues in the order of service: the argmin tenant, then its argmin queue."""

from engine.scheduling.adapter_queue import AdapterQueue
from engine.scheduling.counter_heap import CounterHeap, Key
from engine.scheduling.sequence import Sequence
from engine.scheduling.tenant import Tenant


def comes_before(a: Sequence, b: Sequence) -> bool:
    """Whether sequence `a` is to be served before `b`; the oldest request breaks ties."""
    a_queue, b_queue = a.request.queue, b.request.queue
    if a_queue.tenant is b_queue.tenant:
        a_counter, b_counter = a_queue.counter, b_queue.counter
    else:
        a_counter, b_counter = a_queue.tenant.counter, b_queue.tenant.counter
    return (a_counter, a.request.arrival_number) < (b_counter, b.request.arrival_number)


class FairOrder:
    """An index over some of the waiting queues. A hidden tenant's queues are not offered."""

    def __init__(self) -> None:
        self._tenants = CounterHeap[Tenant](key=self._tenant_key)
        self._queues: dict[Tenant, CounterHeap[AdapterQueue]] = {}

    def __contains__(self, queue: AdapterQueue) -> bool:
        return queue in self._queues.get(queue.tenant, ())

    @property
    def num_offered(self) -> int:
        """Tenants that have a queue on offer."""
        return len(self._tenants)

    def push(self, queue: AdapterQueue, *, hidden: bool) -> None:
        """Add a queue that is not empty, or note that an older sequence now heads it."""
        tenant = queue.tenant
        if tenant not in self._queues:
            self._queues[tenant] = CounterHeap(key=_queue_key)
        self._queues[tenant].push(queue)
        if not hidden:
            self._tenants.push(tenant)

    def discard(self, queue: AdapterQueue) -> None:
        """Take a queue out, if it is in."""
        queues = self._queues.get(queue.tenant)
        if queues is not None:
            queues.discard(queue)
            if not len(queues):
                del self._queues[queue.tenant]
                self._tenants.discard(queue.tenant)

    def hide(self, tenant: Tenant) -> None:
        """Stop offering the tenant's queues, however many there are. O(1)."""
        self._tenants.discard(tenant)

    def show(self, tenant: Tenant) -> None:
        """Offer the tenant's queues again."""
        if tenant in self._queues:
            self._tenants.push(tenant)

    def min(self) -> AdapterQueue | None:
        """The queue to be served first; None if none is offered."""
        tenant = self._tenants.min()
        return None if tenant is None else self._queues[tenant].min()

    def first_of(self, tenant: Tenant) -> AdapterQueue | None:
        """The tenant's queue to be served first, hidden or not."""
        queues = self._queues.get(tenant)
        return None if queues is None else queues.min()

    def _tenant_key(self, tenant: Tenant) -> Key:
        queue = self._queues[tenant].min()
        assert queue is not None, "a tenant without queues is not in the order"
        return tenant.counter, queue.head.request.arrival_number


def _queue_key(queue: AdapterQueue) -> Key:
    return queue.counter, queue.head.request.arrival_number
