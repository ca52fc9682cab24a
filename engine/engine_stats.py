"""What an engine tells of itself at one moment: the answer to `engine.messages.GetStats`."""

import msgspec

from engine.scheduling.wait_causes import WaitCause


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's queue for one adapter, or for the base."""

    tenant: str
    adapter: str | None
    """Digest; None for the base."""
    label: str = ""
    """`name@N`, or the base's name. Versions with the same files share a queue; here each has its
    own entry, with its part of the queue."""
    waiting: int
    running: int
    cause: WaitCause | None
    """What it waits for now; None where nothing waits."""
    waited: dict[str, float]
    """Seconds by cause, summed over all sequences that left the queue since it became busy, of any
    label."""
    oldest: float = 0.0
    """Seconds that its head has waited, as of the last step; 0 where nothing waits."""


class TenantLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many sequences of a tenant run and wait, over all its queues."""

    tenant: str
    running: int
    waiting: int
    slots: int = 0
    """Slots that count towards its quota: those its sequences run on, and one it has reserved."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine, cheap enough to take every second."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    slots_used: int
    slots_total: int
    resident: list[str]
    """Digests that hold a slot, also while they are loaded or drained."""
    preemptions: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    host_adapters: int
    host_adapter_bytes: int
    busy_seconds: float = 0.0
    """Total of all steps; the `engine_seconds` of all requests sum to it."""
    pinned: list[str] = []
    """Digests that keep a slot, or are to get one."""
    warm: list[str] = []
    """Digests that stay in host memory."""
    warming: bool = False
    """Whether the engine is new and still loads the adapters it starts with."""
    queues: list[QueueStats] = []
    """At most 100: the queues in which most sequences wait, then those in which most run."""
    tenants: list[TenantLoad] = []
    """All tenants of which anything runs or waits."""
