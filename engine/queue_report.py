"""What waits and runs at this moment, by tenant, adapter and version.

A queue belongs to a digest. If versions with the same files share it, each gets its own entry.
"""

from collections import Counter
from collections.abc import Iterator

from engine.engine_stats import QueueStats, TenantLoad
from engine.scheduling.adapter_queue import AdapterQueue
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.sequence import Sequence
from engine.scheduling.tenant import is_idle_queue
from engine.scheduling.wait_causes import seconds_by_cause


def queue_stats(lifecycle: Lifecycle, count: int) -> list[QueueStats]:
    """At most `count` queues in which anything waits or runs, those with most waiting first."""
    busy = [
        queue
        for tenant in lifecycle.waiting.tenants.values()
        for queue in tenant.queues.values()
        if not is_idle_queue(queue)
    ]
    busy.sort(key=lambda queue: (-len(queue), -queue.num_running))
    told = [stats for queue in busy[:count] for stats in _stats_of(lifecycle, queue)]
    # Again, by entries: a queue that versions share has several.
    told.sort(key=lambda stats: (-stats.waiting, -stats.running))
    return told[:count]


def tenant_loads(lifecycle: Lifecycle) -> list[TenantLoad]:
    """All tenants of which anything waits or runs. O(queues)."""
    loads = (
        TenantLoad(
            tenant.name,
            sum(queue.num_running for queue in tenant.queues.values()),
            tenant.num_waiting,
            tenant.num_slots_counted,
        )
        for tenant in lifecycle.waiting.tenants.values()
    )
    return [load for load in loads if load.running or load.waiting]


def _stats_of(lifecycle: Lifecycle, queue: AdapterQueue) -> Iterator[QueueStats]:
    if queue.label is not None:
        head = queue.head if queue else None
        yield _stats(lifecycle, queue, queue.label, len(queue), queue.num_running, head)
        return
    running = Counter(
        sequence.request.message.label
        for sequence in lifecycle.running
        if sequence.request.queue is queue
    )
    waiting: dict[str, list[Sequence]] = {}
    for sequence in queue.waiting:
        waiting.setdefault(sequence.request.message.label, []).append(sequence)
    for label in waiting | running:
        of_label = waiting.get(label, [])
        first = of_label[0] if of_label else None
        yield _stats(lifecycle, queue, label, len(of_label), running[label], first)


def _stats(
    lifecycle: Lifecycle,
    queue: AdapterQueue,
    label: str,
    waiting: int,
    running: int,
    first: Sequence | None,
) -> QueueStats:
    return QueueStats(
        tenant=queue.tenant.name,
        adapter=queue.adapter,
        label=label,
        waiting=waiting,
        running=running,
        cause=queue.cause if waiting else None,
        waited=seconds_by_cause(queue.waited),
        oldest=0.0 if first is None else lifecycle.waiting.seconds_waited(first),
    )
