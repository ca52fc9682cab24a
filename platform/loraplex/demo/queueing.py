"""What the demo says of queue time: how long, and what for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_SHORTEST_MS = 0.5
CAUSE_WORDS: Mapping[str, str] = {
    "quota": "its tenant runs as much as it may",
    "load": "for its adapter's weights",
    "slot": "for an adapter slot",
    "kv": "for KV blocks",
    "budget": "for a seat in the batch, or for tokens of the step",
    "turn": "because others were served less so far",
}


@dataclass(frozen=True, slots=True)
class Wait:
    """The median wait of several calls, and what most of their waits was for."""

    ms: float
    cause: str | None
    """None if the median is none to speak of."""

    @classmethod
    def of(cls, queues: Sequence[Mapping[str, float]]) -> "Wait":
        """From the milliseconds in the queue by cause, of each call; at least one."""
        ms = median(sum(queue.values()) for queue in queues)
        sums: dict[str, float] = {}
        for queue in queues:
            for cause, part in queue.items():
                sums[cause] = sums.get(cause, 0.0) + part
        cause = max(sums, key=lambda cause: sums[cause], default=None)
        return cls(ms, cause if ms >= _SHORTEST_MS else None)

    @property
    def words(self) -> str:
        """As `812 ms, budget`."""
        time = f"{self.ms:.0f} ms" if self.ms < 1000 else f"{self.ms / 1000:.1f} s"
        return time if self.cause is None else f"{time}, {self.cause}"
