"""A tenant as the scheduler sees it: a weight, a counter, limits, some queues."""

from engine.scheduling.adapter_queue import AdapterQueue
from engine.scheduling.backpressure import Pressure
from engine.scheduling.fairness import Contenders
from engine.scheduling.wait_causes import HoldClock


class Tenant:
    """Competes with other tenants by `counter`, its queues with each other by theirs."""

    __slots__ = (
        "contenders", "counter", "hold_clock", "is_hastening", "is_out_of_slots", "max_concurrent",
        "max_slots", "name", "num_running", "num_slots", "num_waiting", "pressure", "queues",
        "reserved", "slotless_clock", "weight",
    )  # fmt: skip

    def __init__(self, name: str, now: int) -> None:
        self.name = name
        self.weight = 1.0
        self.counter = 0.0
        """Virtual tokens served, divided by the weight."""
        self.max_concurrent: int | None = None
        self.num_running = 0
        """Seats its sequences take."""
        self.num_waiting = 0
        self.reserved: AdapterQueue | None = None
        """Its queue that has reserved a slot; at most one at a time."""
        self.max_slots: int | None = None
        self.num_slots = 0
        """Distinct adapters that its sequences run on."""
        self.is_out_of_slots = False
        """Whether it holds as many slots as it may, so that its other adapters wait."""
        self.is_hastening = False
        """Whether one of its adapters is being fetched before others; at most one at a time."""
        self.hold_clock = HoldClock(now)
        self.slotless_clock = HoldClock(now)
        """For its queues whose adapter has no slot: runs while either quota holds them back."""
        self.pressure = Pressure(now)
        self.queues: dict[str | None, AdapterQueue] = {}
        self.contenders = Contenders[AdapterQueue](is_idle_queue)

    @property
    def is_held(self) -> bool:
        """Whether its quota holds all its queues back."""
        return self.hold_clock.is_held

    @property
    def has_reservation(self) -> bool:
        """Whether one of its queues has reserved a slot."""
        return self.reserved is not None

    @property
    def has_slots_left(self) -> bool:
        """Whether its quota allows one more adapter in a slot; a reserved slot counts already."""
        if self.max_slots is None:
            return True
        return self.num_slots_counted < self.max_slots

    @property
    def num_slots_counted(self) -> int:
        """Slots that count towards its quota: those it runs on, and the one it has reserved."""
        is_waiting = self.reserved is not None and not self.reserved.num_running
        return self.num_slots + is_waiting

    def may_use_slot(self, queue: AdapterQueue) -> bool:
        """Whether its quota of slots lets the head of one of its queues run."""
        if not self.is_out_of_slots or queue.adapter is None or queue is self.reserved:
            return True
        return queue.num_running > 0 and (not queue.is_yielding or queue.head.is_resuming)

    def can_run(self, num_seats: int) -> bool:
        """Whether its quota allows `num_seats` more. A tenant of which nothing runs may begin."""
        if self.max_concurrent is None or self.num_running == 0:
            return True
        return self.num_running + num_seats <= self.max_concurrent


def is_idle_queue(queue: AdapterQueue) -> bool:
    """Whether a queue neither waits nor runs."""
    return not queue and not queue.num_running


def is_idle_tenant(tenant: Tenant) -> bool:
    """Whether a tenant neither waits nor runs."""
    return not tenant.num_waiting and not tenant.num_running


def charge(queue: AdapterQueue, num_tokens: float) -> None:
    """Charge service to a queue and its tenant; a tenant's queues have equal weights."""
    queue.counter += num_tokens
    queue.tenant.counter += num_tokens / queue.tenant.weight
