"""Other orders of service, to compare the scheduler's own with; for simulations only.

`fair`            ours: the least served tenant, and of it the least served adapter
`fcfs`            the longest waiting head, whoever's it is, and a slot for it as for any other
`resident_first`  what is in a slot is served first, and keeps the slot as long as anybody asks for
                  it: the fewest loads, and no promise to the rest
"""

import math
from collections.abc import Set
from typing import Literal

from engine.config import SchedulerConfig
from engine.scheduling.adapter_queue import AdapterQueue
from engine.scheduling.adapter_slots import Adapter
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.slot_gate import SlotGate
from engine.scheduling.slot_victims import SlotVictims
from engine.scheduling.step_clock import StepClock

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
            victims = _NoVictims(lifecycle.slots, lifecycle.waiting, lifecycle.running)
            lifecycle.gate = SlotGate(lifecycle.slots, lifecycle.waiting, math.inf, victims)
            return lifecycle


class _UnchargedLifecycle(Lifecycle):
    """Counters stay 0, so that the age of the heads decides, which else only breaks ties."""

    def charge(self, queue: AdapterQueue, num_tokens: float) -> None:
        """Book nothing on counters."""
        self.gate.lend(queue.tenant, num_tokens)


class _NoVictims(SlotVictims):
    """No adapter loses a slot that anybody asks for."""

    def candidates(self, reserved: Set[str]) -> list[Adapter]:
        """Nobody."""
        return []
