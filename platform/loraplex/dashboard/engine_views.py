"""What the dashboard's pages about slots and batches read; `views.py` has what they share."""

from typing import Literal

from msgspec import Struct

from engine.scheduling.wait_causes import WaitCause
from loraplex.dashboard.views import PercentileColumns, Window


class SlotOwner(Struct, frozen=True):
    """One of the names that weights in a slot go by."""

    tenant: str
    adapter: str
    version: int | None


class SlotSpan(Struct, frozen=True):
    """One slot in one state for a while; `end` is None while it lasts.

    Without `adapter`, another tenant's. A `reserved` one is of the adapter that the slot is drained
    for, beside the span of the one that is to leave. `is_pinned` is as of now, and for a tenant by
    its own pins alone. `also` names other adapters and versions with the same files, which the same
    weights serve.
    """

    slot: int
    tenant: str | None
    adapter: str | None
    version: int | None
    kind: Literal["loading", "resident", "reserved", "draining"]
    start: float
    end: float | None
    is_pinned: bool = False
    also: list[SlotOwner] = []


class SlotMark(Struct, frozen=True):
    """Something that happened to a slot at one moment."""

    slot: int
    tenant: str | None
    adapter: str | None
    kind: Literal["loaded", "evicted", "failed"]
    at: float


class Wait(Struct, frozen=True):
    """A queue that waits now, and what for. `oldest_seconds` is its head's wait so far.

    `reserved_slot` is the slot that is drained for it, or that loads its adapter.
    """

    tenant: str
    adapter: str
    version: int | None
    cause: WaitCause
    waiting: int
    running: int
    oldest_seconds: float
    reserved_slot: int | None


class Slots(Struct, frozen=True):
    """`GET /dashboard/api/slots?range=`, and event `slots` (its newest second, no window's past).

    `truncated_before` is set when spans were left out because there are too many: those that
    ended before it. `waits` are longest first.
    """

    window: Window
    slots_total: int
    spans: list[SlotSpan]
    marks: list[SlotMark]
    waits: list[Wait]
    evictions: int
    loads: int
    truncated_before: float | None


class StepShare(Struct, frozen=True):
    """Tokens of one adapter in recent steps. The base has adapter `base`, others' have None."""

    tenant: str | None
    adapter: str | None
    prefill_tokens: list[int]
    decode_tokens: list[int]


class Steps(Struct, frozen=True):
    """Recent steps as columns, oldest first; event `steps` brings those since the last one.

    `shares` has the largest adapters, the rest summed as one without a name.
    """

    at: list[float]
    rows: list[int]
    adapters: list[int]
    running: list[int]
    waiting: list[int]
    schedule_seconds: list[float]
    prepare_seconds: list[float]
    forward_seconds: list[float]
    lora_seconds: list[float]
    sample_seconds: list[float]
    post_seconds: list[float]
    shares: list[StepShare]


class Batch(Struct, frozen=True):
    """`GET /dashboard/api/batch?range=`: up to 240 recent steps, and step times over the window.

    `lora_seconds` of a step is part of its `forward_seconds`; the other parts add up to its time.
    """

    window: Window
    recent: Steps
    step_seconds: PercentileColumns
    steps: list[int | None]
    prefill_tokens: list[int | None]
    decode_tokens: list[int | None]
    base_tokens: list[int | None]
    adapters_mean: list[float | None]
    rows_mean: list[float | None]
    max_batch_tokens: int
    max_rows: int
