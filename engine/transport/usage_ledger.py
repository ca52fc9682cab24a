"""Usage that was not written to the database yet, by client, until the client says it was.

What a client leaves unsettled when it dies is handed over to another client, which writes the rows
in its place. Rows are identified by their call, so one that was written but not settled is not
written twice.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from engine.messages import CallUsage, EngineRequest, FinishReason, RequestOutput, RequestTiming


@dataclass(slots=True)
class _Tally:
    # Not the request itself: its prompt would be kept, too.
    tenant: str
    label: str
    is_base: bool
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    engine_seconds: float = 0.0
    reasons: set[FinishReason] = field(default_factory=set[FinishReason])
    timing: RequestTiming | None = None

    def usage(self, call: str) -> CallUsage:
        return CallUsage(
            call=call,
            tenant=self.tenant,
            label=self.label,
            is_base=self.is_base,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            engine_seconds=self.engine_seconds,
            finish_reasons=sorted(self.reasons or {"abort"}),
            timing=self.timing,
        )


@dataclass(slots=True)
class _Open:
    tally: _Tally
    cached_tokens: int = 0
    engine_seconds: float = 0.0


@dataclass(slots=True)
class _Account:
    calls: dict[str, _Tally] = field(default_factory=dict[str, _Tally])
    """The oldest first."""
    requests: dict[int, _Open] = field(default_factory=dict[int, _Open])


class UsageLedger:
    """One account for each client, and one for orphans; each forgets its oldest calls beyond
    `max_calls`."""

    def __init__(self, max_calls: int = 100_000) -> None:
        self._max_calls = max_calls
        self._accounts: dict[Hashable, _Account] = {}
        self._orphans: dict[str, _Tally] = {}
        self._num_forgotten = 0

    @property
    def has_orphans(self) -> bool:
        """Whether there are calls of clients that are gone, which no other client has taken yet."""
        return bool(self._orphans)

    def begin(self, client: Hashable, request: EngineRequest) -> None:
        """A request was queued; one without a `call` is not billed."""
        if not request.call:
            return
        account = self._accounts.setdefault(client, _Account())
        tally = account.calls.get(request.call)
        if tally is None:
            tally = account.calls[request.call] = _Tally(
                request.tenant, request.label, request.adapter is None
            )
            self._bound(account.calls)
        tally.prompt_tokens += len(request.prompt_token_ids)
        account.requests[request.request_id] = _Open(tally)

    def note(self, client: Hashable, output: RequestOutput) -> None:
        """A request got tokens, or ended."""
        account = self._accounts.get(client)
        opened = None if account is None else account.requests.get(output.request_id)
        if account is None or opened is None:
            return
        tally = opened.tally
        for delta in output.deltas:
            tally.output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                tally.reasons.add(delta.finish_reason)
        if output.num_cached_tokens > opened.cached_tokens:
            tally.cached_tokens += output.num_cached_tokens - opened.cached_tokens
            opened.cached_tokens = output.num_cached_tokens
        if output.engine_seconds > opened.engine_seconds:
            tally.engine_seconds += output.engine_seconds - opened.engine_seconds
            opened.engine_seconds = output.engine_seconds
        if output.timing is not None:
            tally.timing = output.timing
        if output.finished:
            del account.requests[output.request_id]

    def abort(self, client: Hashable, request_id: int) -> None:
        """A request's client has aborted it; harmless if it is unknown."""
        account = self._accounts.get(client)
        opened = None if account is None else account.requests.pop(request_id, None)
        if opened is not None:
            opened.tally.reasons.add("abort")

    def settle(self, client: Hashable, calls: Iterable[str]) -> None:
        """The client has written the rows of these calls, or needs none."""
        account = self._accounts.get(client)
        if account is not None:
            for call in calls:
                account.calls.pop(call, None)

    def client_gone(self, client: Hashable) -> None:
        """A client is gone: what it has not settled becomes orphaned."""
        account = self._accounts.pop(client, None)
        if account is None:
            return
        for opened in account.requests.values():
            opened.tally.reasons.add("abort")
        self._orphans.update(account.calls)
        self._bound(self._orphans)

    def hand_over(self, client: Hashable, limit: int = 1000) -> list[CallUsage]:
        """Move up to `limit` orphaned calls to a client's account, and return them."""
        account = self._accounts.setdefault(client, _Account())
        taken: list[CallUsage] = []
        for call in list(islice(self._orphans, limit)):
            tally = account.calls[call] = self._orphans.pop(call)
            taken.append(tally.usage(call))
        self._bound(account.calls)
        return taken

    def take_forgotten(self) -> int:
        """How many calls were forgotten since this was last called."""
        number, self._num_forgotten = self._num_forgotten, 0
        return number

    def num_unsettled(self, client: Hashable) -> int:
        """Calls in a client's account."""
        account = self._accounts.get(client)
        return 0 if account is None else len(account.calls)

    def _bound(self, calls: dict[str, _Tally]) -> None:
        while len(calls) > self._max_calls:
            del calls[next(iter(calls))]
            self._num_forgotten += 1
