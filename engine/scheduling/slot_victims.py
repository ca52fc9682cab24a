"""Whose slot is taken when none is spare: the choice of a victim for `slot_gate.py`."""

from collections.abc import Set

from engine.scheduling.adapter_slots import Adapter, AdapterSlots, SlotState
from engine.scheduling.running import Running
from engine.scheduling.waiting import Waiting


class SlotVictims:
    """Ranks the resident adapters by two rules and changes nothing; every call is O(slots)."""

    def __init__(self, slots: AdapterSlots, waiting: Waiting, running: Running) -> None:
        self._slots = slots
        self._waiting = waiting
        self._running = running

    def candidates(self, reserved: Set[str]) -> list[Adapter]:
        """Adapters that may lose their slot: resident, neither pinned nor among `reserved`."""
        return [
            adapter
            for adapter in self._slots.placed
            if adapter.state is SlotState.RESIDENT
            and not adapter.is_pinned
            and adapter.digest not in reserved
        ]

    def service_of(self, adapter: Adapter) -> tuple[float, float]:
        """How much an adapter was served: (tenant, queue) counters of its least served queue."""
        return min(
            (queue.tenant.counter, queue.counter)
            for queue in self._waiting.queues_of(adapter.digest)
        )

    def most_served(self, reserved: Set[str]) -> Adapter | None:
        """The adapter that was served most; of equals, the one whose sequences end soonest."""
        candidates = self.candidates(reserved)
        service = {adapter: self.service_of(adapter) for adapter in candidates}
        most = max(service.values(), default=None)
        tied = [adapter for adapter in candidates if service[adapter] == most]
        if len(tied) > 1:
            tokens_left = self._running.tokens_left()
            tied.sort(key=lambda adapter: tokens_left[adapter.digest])
        return next(iter(tied), None)

    def least_felt(self, reserved: Set[str], stint: int) -> Adapter | None:
        """The adapter whose pause is felt least.

        That is the one with the fewest sequences and, of equals, the one that would hold its slot
        longest: what ends soon makes room by itself. Further ties go to the one placed first. An
        adapter with a sequence that has not drawn `stint` tokens yet comes after all others.
        """
        tokens_left = self._running.tokens_left()
        fresh = {s.request.message.adapter for s in self._running if s.num_drawn < stint}
        return min(
            self.candidates(reserved),
            key=lambda adapter: (
                adapter.digest in fresh,
                adapter.wanted,
                -tokens_left[adapter.digest],
            ),
            default=None,
        )
