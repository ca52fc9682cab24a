"""A request as the scheduler sees it: who asked, its choices, and where its time went."""

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from engine.messages import EngineRequest, RequestTiming
from engine.scheduling.wait_causes import CAUSES, seconds_by_cause
from engine.telemetry.records import EndReason, RequestState

if TYPE_CHECKING:
    from engine.scheduling.adapter_queue import AdapterQueue
    from engine.scheduling.sequence import Sequence


MAX_CHANGES = 32
"""Entries of a request's timeline that are kept."""


class RequestKey(NamedTuple):
    """Clients number their own requests, so both parts are needed."""

    client: Hashable
    request_id: int


class Request:
    """One prompt and its `n` choices; lives until its last choice has left the scheduler.

    `waited` is its queue time, in nanoseconds by cause. Of several choices each preempted one waits
    on its own, and `waited` is the sum.
    """

    __slots__ = (
        "arrival_number", "arrived", "changes", "end_reasons", "engine_ns", "error_code",
        "first_admitted", "first_token", "has_untold_wait", "is_decoding", "key", "last_token",
        "load_ns", "longest_gap", "message", "num_cached_tokens", "num_output_tokens",
        "num_preemptions", "queue", "sequences", "share_key", "waited",
    )  # fmt: skip

    def __init__(
        self,
        key: RequestKey,
        message: EngineRequest,
        queue: "AdapterQueue",
        *,
        arrival_number: int,
        now: int = 0,
    ) -> None:
        self.key = key
        self.message = message
        self.queue = queue
        self.share_key = message.tenant, None if message.adapter is None else message.label
        """(tenant, label of the adapter or None): under which its rows are counted in a step."""
        self.arrival_number = arrival_number
        """Position in the order of all arrivals."""
        self.arrived = now
        """In nanoseconds, as all times here."""
        self.sequences: list[Sequence] = []
        """Sequences still queued or running; until the fork one sequence stands for all choices."""
        self.waited = [0] * len(CAUSES)
        self.has_untold_wait = False
        """Whether a wait has ended that no timing sent to the client includes yet."""
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache, at the first admission."""
        self.engine_ns = 0.0
        """Its share, by tokens, of the time of the steps that it ran in."""
        self.first_admitted: int | None = None
        self.first_token: int | None = None
        self.last_token: int | None = None
        self.longest_gap = 0
        """The longest time between two tokens."""
        self.num_output_tokens = 0
        """Summed over all choices."""
        self.is_decoding = False
        """Whether a token was drawn since it was last admitted."""
        self.changes: list[tuple[int, RequestState]] = [(now, "queued")]
        """(time, new state), for the first `MAX_CHANGES` changes of its state."""
        self.load_ns = 0
        """How long its adapter's load took, if it waited for one."""
        self.end_reasons: list[EndReason] = []
        """How choices ended, one entry for each that has ended."""
        self.error_code: str | None = None

    def note_token(self, now: int) -> None:
        """A token was drawn."""
        last = self.last_token
        if last is None:
            self.first_token = now
        elif now - last > self.longest_gap:
            self.longest_gap = now - last
        self.last_token = now
        self.num_output_tokens += 1
        if not self.is_decoding:
            self.is_decoding = True
            self.note_change("decode", now)

    def note_change(self, state: RequestState, now: int) -> None:
        """The request changed its state."""
        if len(self.changes) < MAX_CHANGES:
            self.changes.append((now, state))

    def timing(self) -> RequestTiming:
        """Where the time went so far, in seconds."""
        admitted, first, last = self.first_admitted, self.first_token, self.last_token
        return RequestTiming(
            queue=seconds_by_cause(self.waited),
            prefill=0.0 if first is None or admitted is None else (first - admitted) / 1e9,
            decode=0.0 if last is None or first is None else (last - first) / 1e9,
            preemptions=self.num_preemptions,
        )
