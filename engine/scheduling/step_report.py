"""Reports about a step: whose rows it has, and how much is held at its end."""

from typing import NamedTuple

from engine.engine_stats import EngineStats
from engine.queue_report import queue_stats, tenant_loads
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.step_plan import StepPlan


class EngineLoad(NamedTuple):
    """How full the engine is."""

    running: int
    """Sequences."""
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    slots_used: int
    slots_total: int
    preemptions: int
    """Since the start."""


Composition = dict[tuple[str, str | None], list[int]]
"""By (tenant, label of the adapter or None): prefill rows, prefill tokens, decode rows."""


def composition_of(plan: StepPlan) -> Composition:
    """Whose rows a plan has; call it before the plan is committed. Fillers are left out.

    O(rows), some hundred nanoseconds for each.
    """
    shares: Composition = {}
    for sequence, num_tokens in plan.grants.items():
        key = sequence.request.share_key
        share = shares.get(key)
        if share is None:
            share = shares[key] = [0, 0, 0]
        if sequence.num_computed < sequence.prefill_length:
            share[0] += 1
            share[1] += num_tokens
        else:
            share[2] += 1
    return shares


def load_of(lifecycle: Lifecycle) -> EngineLoad:
    """What is held and what waits."""
    return EngineLoad(
        running=len(lifecycle.running),
        waiting=lifecycle.waiting.num_waiting,
        kv_blocks_used=lifecycle.blocks.num_used,
        kv_blocks_total=lifecycle.blocks.num_blocks,
        slots_used=lifecycle.slots.num_placed,
        slots_total=lifecycle.slots.num_slots,
        preemptions=lifecycle.num_preemptions,
    )


def stats_of(lifecycle: Lifecycle, *, steps: int, output_tokens: int, busy_ns: int) -> EngineStats:
    """The same and more, for the service; the numbers about host memory are 0."""
    load = load_of(lifecycle)
    return EngineStats(
        **load._asdict(),
        resident=[adapter.digest for adapter in lifecycle.slots.placed],
        steps=steps,
        prompt_tokens=lifecycle.num_prompt_tokens,
        cached_tokens=lifecycle.num_cached_tokens,
        output_tokens=output_tokens,
        host_adapters=0,
        host_adapter_bytes=0,
        busy_seconds=busy_ns / 1e9,
        queues=queue_stats(lifecycle, 100),
        tenants=tenant_loads(lifecycle),
    )
