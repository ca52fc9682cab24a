"""Messages between the service and the engine, as msgspec structs.

A request is known by (client, request_id): the client numbers its own requests. Every engine
message carries the engine's `generation`, so that a restarted engine's peers drop what is stale.
"""

from typing import Literal

import msgspec

from engine.engine_info import EngineInfo
from engine.engine_stats import EngineStats
from engine.errors import RequestRefused
from engine.refusal_notes import NoteRefusals
from engine.sampling_params import SamplingParams
from engine.scheduling.backpressure import Congestion
from engine.telemetry.records import GetTelemetry, Telemetry

# `gc=False` on structs that exist for every token: they cannot be part of a reference cycle, so the
# collector need not track them.
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
    """`name@N`, or the base's name: for statistics, and for ending the calls of one version."""
    call: str = ""
    """Id of the API call that it belongs to, under which its usage is kept until `Settle`; "" keeps
    no usage."""
    weight: float = 1.0
    """The tenant's share."""
    max_concurrent: int | None = None
    """Sequences of this tenant that may run at once; others wait with the cause `quota`."""
    max_slots: int | None = None
    """Slots that this tenant's adapters may use at once; its other adapters wait for `quota`."""
    max_queued: int | None = None
    """Sequences of this tenant that may wait, if fewer than the engine's own limit."""
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
    """Where a request's time went, in seconds; the values of `queue` sum to its queue time."""

    queue: dict[str, float]
    """By cause of waiting (`engine.scheduling.wait_causes.WaitCause`)."""
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
    """Its share, by tokens, of the time of the steps that it ran in so far."""
    finished: bool = False
    timing: RequestTiming | None = None
    """So far. Sent with the first token, with the first one after a preemption, and at the end."""
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
    """Recorded for choices that have not ended by themselves; `stop`: cut at a stop string."""
    num_tokens: int | None = None
    """Output tokens that its client was shown, for statistics; None: as many as were drawn."""


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
    """The digests that are pinned and warm from now on: all of them, so repeating it is harmless.

    `recent` lists adapters to read ahead; only a new engine's first message of this kind uses it.
    """

    pinned: list[str]
    warm: list[str]
    recent: list[str] = []


class EndCalls(msgspec.Struct, frozen=True, kw_only=True, tag="end_calls"):
    """End a tenant's requests, of any client: all of them, or those labelled `name@N`.

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
    """An adapter was deleted, or with `adapter` None the whole tenant. Not answered.

    From now on its statistics are part of the shared totals, without its name. Ends no calls.
    """

    tenant: str
    adapter: str | None = None


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """The usage of these calls has been written, or is not billed to anybody. Not answered."""

    calls: list[str]


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Last message of a client, which thereby leaves and is not taken for lost. Not answered."""


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
    """Sent to every client at least once a second, except while a step runs."""

    generation: int
    draining: bool = False
    """New requests are refused."""
    warming: bool = False
    """Whether the engine still loads the adapters it starts with; it serves requests meanwhile."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The request is queued."""

    generation: int
    request_id: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request is not queued; a `RequestRefused` on its way to the client."""

    generation: int
    request_id: int
    code: str
    message: str
    param: str | None = None
    limit: int | None = None
    congestion: Congestion | None = None

    @staticmethod
    def of(generation: int, request_id: int, refusal: RequestRefused) -> "Refused":
        """The message for a refusal."""
        return Refused(
            generation,
            request_id,
            refusal.code,
            refusal.message,
            param=refusal.param,
            limit=refusal.limit,
            congestion=refusal.congestion,
        )

    @property
    def refusal(self) -> RequestRefused:
        """The refusal, for the client to raise."""
        return RequestRefused(
            self.code,
            self.message,
            param=self.param,
            limit=self.limit,
            congestion=self.congestion,
        )


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All outputs of one step for this client: one message a step."""

    generation: int
    outputs: list[RequestOutput]


class Need(msgspec.Struct, frozen=True, tag="need"):
    """Put the verified files of `digest` at `cache/<digest>/`; answer `Have` or `FetchFailed`."""

    generation: int
    digest: str


class CallUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What an API call has used, all its requests together."""

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
    """As last reported by one of its requests."""


class Orphans(msgspec.Struct, frozen=True, tag="orphans"):
    """Calls that a client left unsettled when it went; from now on this client settles them."""

    generation: int
    calls: list[CallUsage]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Answers `GetStats`."""

    generation: int
    call_id: int
    stats: EngineStats


EngineMessage = Welcome | Alive | Accepted | Refused | Outputs | Need | Orphans | Stats | Telemetry
