"""How much of an engine is in use, over simulated time."""

from dataclasses import dataclass


@dataclass(slots=True)
class UseMeter:
    """Sums over the time in which steps ran; an idle engine adds nothing."""

    seconds: float = 0.0
    kv_seconds: float = 0.0
    """KV blocks x seconds; the next two are slots and sequences x seconds."""
    slot_seconds: float = 0.0
    running_seconds: float = 0.0
    kv_peak: int = 0
    running_peak: int = 0

    def add(self, seconds: float, kv_blocks: int, slots: int, running: int) -> None:
        """Add what was in use during `seconds` in which steps ran."""
        self.seconds += seconds
        self.kv_seconds += seconds * kv_blocks
        self.slot_seconds += seconds * slots
        self.running_seconds += seconds * running
        if kv_blocks > self.kv_peak:
            self.kv_peak = kv_blocks
        if running > self.running_peak:
            self.running_peak = running

    def merge(self, other: "UseMeter") -> None:
        """Add the sums of another engine."""
        self.seconds += other.seconds
        self.kv_seconds += other.kv_seconds
        self.slot_seconds += other.slot_seconds
        self.running_seconds += other.running_seconds
        self.kv_peak = max(self.kv_peak, other.kv_peak)
        self.running_peak = max(self.running_peak, other.running_peak)

    def mean(self, total: float) -> float:
        """A sum over the time: `use.mean(use.kv_seconds)` blocks."""
        return total / self.seconds if self.seconds else 0.0
