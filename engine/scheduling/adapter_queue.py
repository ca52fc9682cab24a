"""The FIFO of one (tenant, adapter): the unit of fairness and of waiting."""

from collections import OrderedDict
from typing import TYPE_CHECKING

from engine.scheduling.backpressure import Pressure
from engine.scheduling.sequence import Sequence
from engine.scheduling.wait_causes import CAUSES, WaitCause, WaitLedger

if TYPE_CHECKING:
    from engine.scheduling.fair_order import FairOrder
    from engine.scheduling.tenant import Tenant


class AdapterQueue:
    """Waiting sequences of one tenant for one adapter, or for the base model.

    Ordered by arrival, save that preempted sequences come first. Every operation is O(1).
    """

    __slots__ = (
        "_sequences", "adapter", "counter", "is_yielding", "label", "ledger", "num_running",
        "order", "pressure", "tenant", "waited",
    )  # fmt: skip

    def __init__(
        self, tenant: "Tenant", adapter: str | None, *, cause: WaitCause, now: int
    ) -> None:
        self.tenant = tenant
        self.adapter = adapter
        """Digest; None for the base model."""
        self.label: str | None = None
        """The label of its requests since it was last idle; None if versions with the same files
        share it."""
        self.counter = 0.0
        """Virtual tokens served, compared with those of the tenant's other queues."""
        self.ledger = WaitLedger(tenant.hold_clock, cause, now)
        self.order: FairOrder | None = None
        """The order that offers it (see `standing.py`); None while it is empty or parked."""
        self.num_running = 0
        """Sequences of this queue that run now."""
        self.is_yielding = False
        """It admits nothing more: its tenant is out of slots, and a less served queue waits."""
        self.pressure = Pressure(now)
        self.waited = [0] * len(CAUSES)
        """Nanoseconds by cause, summed over the waits of all sequences that have left the queue."""
        self._sequences = OrderedDict[int, Sequence]()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def head(self) -> Sequence:
        """The sequence to be admitted next; the queue is not empty."""
        return next(iter(self._sequences.values()))

    @property
    def cause(self) -> WaitCause | None:
        """What it waits for; None where nothing waits."""
        if not self._sequences:
            return None
        return "quota" if self.ledger.is_held else self.ledger.cause

    @property
    def waiting(self) -> list[Sequence]:
        """All sequences, in order."""
        return list(self._sequences.values())

    def append(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._sequences[sequence.sequence_id] = sequence

    def append_first(self, sequence: Sequence) -> None:
        """Queue a preempted sequence, before all others."""
        self._sequences[sequence.sequence_id] = sequence
        self._sequences.move_to_end(sequence.sequence_id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, from wherever it stands."""
        del self._sequences[sequence.sequence_id]
