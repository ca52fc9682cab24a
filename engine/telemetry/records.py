"""What the engine tells of its work: one record a request, a step, a change of a slot.

Plain structs without a prompt, a token or a key in them, small enough to keep thousands. Readers
ask with `GetTelemetry` for all that is new since their last cursor, any number of readers at once;
whoever comes late is told how much was overwritten. `EngineTotals` are sums since the engine's
start, of which nothing is ever lost. A tenant sees of all this what carries its own name.
"""

from typing import Literal

import msgspec

RequestState = Literal["queued", "loaded", "prefill", "decode", "preempted", "done"]
"""`queued` at 0; `loaded`: its adapter is in its slot; one `prefill` for each chunk; `decode`: the
first token is there; `preempted`: back in the queue; `done`: over, whatever the reason."""

EndReason = Literal["stop", "length", "abort", "error", "timeout"]
"""How a choice ended; `abort`: its client went away, `timeout`: the call's deadline came."""

SlotEventKind = Literal["loading", "resident", "reserved", "draining", "evicted", "shared"]
"""`reserved`: an adapter waits for a slot, which the `draining` one is to leave. `shared`: the
weights that a slot holds, or is to hold, are asked for under one more name."""


_BEST_LAST: tuple[EndReason, ...] = ("error", "timeout", "abort", "length", "stop")


class RequestRecord(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True, gc=False
):
    """One request that is over, however it ended. A call with several prompts has several."""

    call: str
    """Id of the reply that it is part of (`chatcmpl-…`), which its usage row has too."""
    tenant: str
    adapter: str | None
    """The adapter's name; None for the base model."""
    version: int | None
    """None for the base model."""
    arrived: float
    """In the engine, Unix seconds."""
    queue: dict[str, float]
    """Seconds by cause (`engine.messages.WaitCause`), those without any left out. They sum to the
    queue time."""
    load_seconds: float
    """What its adapter took to come to host memory and from there into its slot, where this
    request waited for that; else 0. Not a part of the queue time, which has its own `load`."""
    ttft: float | None
    """Seconds from its arrival to its first token; None if there was none."""
    seconds: float
    """From its arrival to its end."""
    decode_seconds: float
    """From the first token to the last."""
    longest_gap: float
    """Seconds between two tokens at most, of any of its choices; 0 below two tokens."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Of all choices; those that a client was shown, where a text was cut at a stop string."""
    finish_reasons: tuple[EndReason, ...]
    """One for each choice, as they ended."""
    preemptions: int
    timeline: tuple[tuple[float, RequestState], ...] = ()
    """Seconds from its arrival, state; the first 32 changes and the last."""
    error_code: str | None = None
    """Why, where a choice ended with `error`."""
    may_stop: bool = True
    """Whether the model could end it before its last token: not where the request said
    `ignore_eos`, or asked for no fewer tokens than it allowed."""

    @property
    def queue_seconds(self) -> float:
        """Queue time over all causes."""
        return sum(self.queue.values())

    @property
    def label(self) -> str | None:
        """`name@N`; None for the base model."""
        return None if self.adapter is None else f"{self.adapter}@{self.version}"

    @property
    def finish_reason(self) -> EndReason:
        """The reason of all choices; where they differ, the one that is worst to have."""
        for reason in _BEST_LAST:
            if reason in self.finish_reasons:
                return reason
        return "abort"

    @property
    def seconds_per_token(self) -> float | None:
        """Mean seconds between two tokens of a choice; None below two."""
        gaps = self.output_tokens - len(self.finish_reasons)
        return self.decode_seconds * len(self.finish_reasons) / gaps if gaps > 0 else None


class StepSeconds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a step's time went; the parts sum to the step."""

    schedule: float
    """Adapter events, slot changes and the scheduler's plan."""
    prepare: float
    """Rows to tensors, block copies."""
    forward: float
    """The forward pass without `lora`."""
    lora: float
    """Adapters' updates: measured in one step of some, and estimated from it in the others."""
    sample: float
    post: float
    """Taking in what was drawn."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        parts = self.schedule + self.prepare + self.forward
        return parts + self.lora + self.sample + self.post


class StepShare(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one adapter, or a tenant's use of the base, had of a step."""

    tenant: str
    """"": the sum of those that are too many to be named."""
    label: str | None
    """`name@N`; None for the base model."""
    prefill_rows: int
    prefill_tokens: int
    decode_rows: int
    """Each a token."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One step that computed something."""

    at: float
    """Its begin, Unix seconds."""
    number: int
    """Counted from the engine's start."""
    seconds: StepSeconds
    shares: tuple[StepShare, ...]
    """The 16 with most tokens, then the rest as one."""
    adapters: int
    """Different adapters in the batch."""
    running: int
    """Sequences at its end; so with the numbers below."""
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    slots_used: int
    slots_total: int
    preemptions: int
    """In this step."""

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return sum(share.prefill_rows + share.decode_rows for share in self.shares)

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computed."""
        return sum(share.prefill_tokens + share.decode_rows for share in self.shares)


class AdapterOwner(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whose adapter a digest is: equal files of two tenants share a digest and a slot."""

    tenant: str
    label: str
    """`name@N`."""


class SlotEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """An adapter's way into a slot and out of it."""

    at: float
    """Unix seconds."""
    slot: int | None
    """Of a `reserved` one, the slot that is drained for it; of several such slots, it gets the one
    that is free first."""
    digest: str
    owners: tuple[AdapterOwner, ...]
    """Those that asked for it lately: the one that asked last before it was loaded comes first. At
    most 16; none for an adapter that is only pinned so far."""
    kind: SlotEventKind


class Histogram(msgspec.Struct, array_like=True, gc=False):
    """Observations in buckets whose upper bounds belong to the metric, see `totals`."""

    counts: list[int]
    """In each bucket, not cumulative; the last one is for what is above all bounds."""
    sum: float = 0.0

    @property
    def count(self) -> int:
        """All observations."""
        return sum(self.counts)


class AdapterTotals(msgspec.Struct, kw_only=True, array_like=True):
    """Sums over one adapter's requests, all versions together, since the engine's start.

    Only the adapters with most traffic have their own; `tenant` "" is the sum over all others,
    deleted ones included. So the sum over all is that of all requests at any time.
    """

    tenant: str
    adapter: str | None
    """The name; None for a tenant's use of the base model."""
    requests: dict[str, int]
    """By finish reason (`RequestRecord.finish_reason`)."""
    queue: dict[str, Histogram]
    """Seconds by cause, of requests that waited for it."""
    queue_total: Histogram
    """Seconds over all causes, of every request."""
    ttft: Histogram
    seconds_per_token: Histogram
    seconds: Histogram
    """End to end."""
    load_seconds: Histogram
    """One observation a load into a slot, the way to host memory included."""
    resident_seconds: float
    """In slots, until now."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    refused: dict[str, int]
    """By reason code."""
    good: int
    """Requests within the service's objective, see `EngineTotals.objective`."""


class Objective(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """When a request counts as good: it ended with `stop` or `length`, within both."""

    ttft: float = 0.5
    """Seconds from its arrival to its first token."""
    seconds_per_token: float = 0.08
    """Mean seconds between two tokens."""


class EngineTotals(msgspec.Struct, kw_only=True, array_like=True):
    """Sums since the engine's start, and the adapters' own."""

    started: float
    """Unix seconds."""
    objective: Objective
    adapters: list[AdapterTotals]
    steps: int
    step_parts: dict[str, float]
    """Seconds of all steps by part (`StepSeconds`)."""
    step_seconds: Histogram
    step_rows: Histogram
    step_tokens: Histogram
    step_adapters: Histogram


class Cursor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far a reader has come; opaque to it. The first one asks for all that is kept."""

    generation: int = 0
    """Of the engine; what was read from another one counts as nothing."""
    requests: int = 0
    steps: int = 0
    slot_events: int = 0


class GetTelemetry(msgspec.Struct, frozen=True, kw_only=True, tag="get_telemetry"):
    """Answered by `Telemetry`."""

    call_id: int = 0
    cursor: Cursor = Cursor()
    """Of the last answer."""
    limit: int = 500
    """Records of each kind at most; the rest comes with the next call."""
    with_totals: bool = False
    """Whether to send `Telemetry.totals`."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, tag="telemetry"):
    """Records since a cursor, the oldest first in each list."""

    generation: int
    call_id: int
    cursor: Cursor
    """For the next call."""
    requests: list[RequestRecord]
    steps: list[StepRecord]
    slot_events: list[SlotEvent]
    missed: int
    """Records after the given cursor that were overwritten before they could be read."""
    has_more: bool = False
    """Whether `limit` cut the answer."""
    totals: EngineTotals | None = None
