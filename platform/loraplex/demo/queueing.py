"""What the demo says of queue time: how long, and what for."""

from collections.abc import Iterable, Mapping
from statistics import median

CAUSE_WORDS: Mapping[str, str] = {
    "quota": "its tenant runs as much as it may",
    "load": "for its adapter's weights",
    "slot": "for an adapter slot",
    "kv": "for KV blocks",
    "budget": "for a seat in the batch, or for tokens of the step",
    "turn": "because others were served less so far",
}


def main_cause(queues: Iterable[Mapping[str, float]]) -> str | None:
    """The cause with most of the time; None if nobody waited."""
    sums: dict[str, float] = {}
    for queue in queues:
        for cause, ms in queue.items():
            sums[cause] = sums.get(cause, 0.0) + ms
    cause = max(sums, key=lambda cause: sums[cause], default=None)
    return cause if cause is not None and sums[cause] > 0 else None


def queue_words(queues: Iterable[Mapping[str, float]]) -> str:
    """The median wait, and what most of all waits was for: `812 ms, budget`; "-" of none."""
    told = list(queues)
    if not told:
        return "-"
    ms = median(sum(queue.values()) for queue in told)
    time = f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"
    cause = main_cause(told)
    return time if cause is None else f"{time}, {cause}"
