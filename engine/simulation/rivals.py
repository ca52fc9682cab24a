"""Other orders of service, to compare the scheduler's own with; for simulations only.

`fair`            ours: the least served tenant, and of it the least served adapter
`fcfs`            the longest waiting head, whoever's it is, and a slot for it as for any other
`resident_first`  what is in a slot is served first, and keeps the slot as long as anybody asks for
                  it: the fewest loads, and no promise to the rest
"""

import math
from typing import Literal

from engine.adapter_queue import AdapterQueue
from engine.adapter_slots import Adapter
from engine.config import SchedulerConfig
from engine.lifecycle import Lifecycle
from engine.slot_gate import SlotGate
from engine.step_clock import StepClock

Order = Literal["fair", "fcfs", "resident_first"]
ORDERS: tuple[Order, ...] = ("fair", "fcfs", "resident_first")


def rival_lifecycle(order: Order, config: SchedulerConfig, time: StepClock) -> Lifecycle:
    """A lifecycle in which this order emerges."""
    match order:
        case "fair":
            return Lifecycle(config, time)
        case "fcfs":
            return _UnchargedLifecycle(config, time)
        case "resident_first":
            lifecycle = Lifecycle(config, time)
            lifecycle.gate = _LoyalGate(
                lifecycle.slots, lifecycle.waiting, lifecycle.running, math.inf
            )
            return lifecycle


class _UnchargedLifecycle(Lifecycle):
    """Counters stay 0, so that the age of the heads decides, which else only breaks ties."""

    def charge(self, queue: AdapterQueue, num_tokens: float) -> None:
        """Book nothing on counters."""
        self.gate.lend(queue.tenant, num_tokens)


class _LoyalGate(SlotGate):
    """Takes no adapter's slot that anybody asks for."""

    def _victim_candidates(self) -> list[Adapter]:
        return []
