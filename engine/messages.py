"""Messages between the service and the engine, as msgspec structs.

A request is known by (client, request_id): the client numbers its own requests. Every engine
message carries the engine's `generation`, so that a restarted engine's peers drop what is stale.
"""

from typing import Literal

import msgspec

from engine.backpressure import Congestion
from engine.engine_info import EngineInfo
from engine.engine_stats import EngineStats
from engine.refusal_notes import NoteRefusals
from engine.sampling_params import SamplingParams
from engine.telemetry.records import GetTelemetry, Telemetry

# `gc=False` where tokens are many: what cannot be part of a cycle need not be looked at for one.
FinishReason = Literal["stop", "length", "abort", "error"]
AbortReason = Literal["abort", "stop", "timeout"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation request, resolved and tokenised."""

    request_id: int
    tenant: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter: str | None = None
    """Digest; None for the base model."""
    label: str = ""
    """`name@N`, or the base's name: for statistics, and to end a version's calls by."""
    call: str = ""
    """The call that it is part of: its usage is kept for that until `Settle`; "": it has none."""
    weight: float = 1.0
    """The tenant's share."""
    max_concurrent: int | None = None
    """Sequences of this tenant that may run at once; more wait with the cause `quota`."""
    max_slots: int | None = None
    """Slots that this tenant's adapters may use at once; calls of others wait for `quota`."""
    max_queued: int | None = None
    """Sequences of this tenant that may wait, where that is less than the engine's own limit."""
    cache_salt: str = ""
    """Narrows the prefix cache further; it can never widen it past the tenant."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of a drawn token, and the most likely ones beside it."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class ChoiceDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one choice. `stop_token_id` names the id that ended it, where one did."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class RequestTiming(msgspec.Struct, frozen=True, gc=False):
    """Where a request's time went, in seconds; `queue` sums to the whole queue time."""

    queue: dict[str, float]
    """By cause of waiting (`engine.wait_causes.WaitCause`)."""
    prefill: float
    """First admission to first token."""
    decode: float
    """First token to last token."""
    preemptions: int = 0

    @property
    def queue_seconds(self) -> float:
        """Queue time over all causes."""
        return sum(self.queue.values())


class RequestOutput(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a step produced for a request. The last one has `finished` and `timing`."""

    request_id: int
    deltas: list[ChoiceDelta] = []
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    engine_seconds: float = 0.0
    """So far: its tokens' share of the steps that it ran in."""
    finished: bool = False
    timing: RequestTiming | None = None
    """So far: with the first token, with the first one after a preemption, and at the end."""
    error_code: str | None = None
    error: str | None = None


# Client to engine.
class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a client; answered by `Welcome`."""


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """The client lives. After 2 s of silence its sequences are aborted."""


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Answered by `Accepted` or `Refused`, then by outputs."""

    request: EngineRequest
    session: int = 0
    """The session of the last `Welcome`; a request of an older session is dropped."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget a request; harmless when it is unknown or over. Not answered."""

    request_id: int
    reason: AbortReason = "abort"
    """Why its choices end that have not ended by themselves; `stop`: at a stop string."""
    num_tokens: int | None = None
    """Output tokens that its client was shown; None: as many as were drawn. For statistics."""


class Have(msgspec.Struct, frozen=True, tag="have"):
    """The verified files of `digest` lie in the shared cache folder."""

    digest: str


class FetchFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The files of `digest` cannot be had."""

    digest: str
    reason: str


class Unload(msgspec.Struct, frozen=True, tag="unload"):
    """No live version has this digest any more: drop it once its sequences have ended."""

    digest: str


class SetResidency(msgspec.Struct, frozen=True, tag="residency"):
    """What is pinned and warm from now on, by digest: all of it, so that a repetition is harmless.

    `recent`, adapters to read ahead, counts in the first message that a new engine gets.
    """

    pinned: list[str]
    warm: list[str]
    recent: list[str] = []


class EndCalls(msgspec.Struct, frozen=True, kw_only=True, tag="end_calls"):
    """End a tenant's requests, whichever client's: all, or those labelled `name@N`.

    Each ends with an output that carries `code` and `reason`. Not answered.
    """

    tenant: str
    adapter: str | None = None
    """The adapter's name; None: all of the tenant's requests, those for the base included."""
    version: int | None = None
    """None: all versions of `adapter`."""
    code: str
    reason: str

    def concerns(self, request: EngineRequest) -> bool:
        """Whether this request is to end."""
        if request.tenant != self.tenant:
            return False
        if self.adapter is None:
            return True
        name, _, version = request.label.rpartition("@")
        return (
            request.adapter is not None
            and name == self.adapter
            and (self.version is None or str(self.version) == version)
        )


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """An adapter was deleted; without a name, the whole tenant. Ends no calls. Not answered.

    Its statistics are kept among those of all others from now on, without its name.
    """

    tenant: str
    adapter: str | None = None


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """The usage of these calls is written, or nobody's to pay. Not answered."""

    calls: list[str]


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Last message of a client that ends: it is not lost. Not answered."""


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Answered by `Stats`."""

    call_id: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse new requests from now on, and go on with those queued or running."""


ClientMessage = (
    Hello
    | Heartbeat
    | Generate
    | Abort
    | Have
    | FetchFailed
    | Unload
    | SetResidency
    | EndCalls
    | Forget
    | Settle
    | NoteRefusals
    | Goodbye
    | GetStats
    | GetTelemetry
    | Drain
)


# Engine to client.
class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The engine is ready, and knows this client.

    A client that gets a new `session` has lost every request it sent under the old one.
    """

    generation: int
    info: EngineInfo
    session: int = 0
    warming: bool = False
    """As in `Alive`."""
    recent: list[str] = []
    """All adapters on the engine's disk, also of the engines before it, the last used first."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Sent to every client at least once a second, idle or busy, but for the length of a step."""

    generation: int
    draining: bool = False
    """New requests are refused."""
    warming: bool = False
    """The engine is new, and still loads what it starts with; requests are served all the same."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The request is queued."""

    generation: int
    request_id: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request is not queued; fields as in `engine.errors.RequestRefused`."""

    generation: int
    request_id: int
    code: str
    message: str
    param: str | None = None
    limit: int | None = None
    congestion: Congestion | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All outputs of one step for this client: one message a step."""

    generation: int
    outputs: list[RequestOutput]


class Need(msgspec.Struct, frozen=True, tag="need"):
    """Put the verified files of `digest` at `cache/<digest>/`; answer `Have` or `FetchFailed`."""

    generation: int
    digest: str


class CallUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a call has used, all its requests together."""

    call: str
    tenant: str
    label: str
    """`name@N`, unless `is_base`."""
    is_base: bool
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    engine_seconds: float = 0.0
    finish_reasons: list[FinishReason]
    timing: RequestTiming | None
    """Of its last request to say so."""


class Orphans(msgspec.Struct, frozen=True, tag="orphans"):
    """Calls of a client that is gone without having settled them: now this client's to settle."""

    generation: int
    calls: list[CallUsage]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Answers `GetStats`."""

    generation: int
    call_id: int
    stats: EngineStats


EngineMessage = Welcome | Alive | Accepted | Refused | Outputs | Need | Orphans | Stats | Telemetry
