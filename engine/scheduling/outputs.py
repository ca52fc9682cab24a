"""What a step says to the clients: one message for each request that got a token or ended."""

from engine.messages import (
    ChoiceDelta,
    FinishReason,
    RequestOutput,
    RequestTiming,
    TokenLogprob,
)
from engine.scheduled_batch import SampledToken
from engine.scheduling.request import Request, RequestKey
from engine.scheduling.sequence import Sequence


class _Draft:
    __slots__ = ("deltas", "error", "error_code", "is_last", "timing")

    def __init__(self) -> None:
        self.deltas: list[ChoiceDelta] = []
        self.is_last = False
        self.timing: RequestTiming | None = None
        self.error_code: str | None = None
        self.error: str | None = None


class Outputs:
    """Collects what happens to requests until it is taken, in the order of first mention."""

    def __init__(self) -> None:
        self._drafts: dict[Request, _Draft] = {}

    def __len__(self) -> int:
        return len(self._drafts)

    def token(
        self, sequence: Sequence, token: SampledToken, finish_reason: FinishReason | None
    ) -> None:
        """A sequence that stands for one choice drew a token, maybe its last."""
        logprobs = None
        if sequence.params.logprobs is not None and token.logprob is not None:
            logprobs = [TokenLogprob(token.token_id, token.logprob, list(token.top))]
        request = sequence.request
        draft = self._draft(request)
        if request.has_untold_wait:
            # Not at the end only: whoever cuts a text at a stop string never hears of that.
            request.has_untold_wait = False
            draft.timing = request.timing()
        draft.deltas.append(
            ChoiceDelta(
                sequence.choices[0],
                [token.token_id],
                logprobs,
                finish_reason,
                token.token_id if finish_reason == "stop" else None,
            )
        )

    def failed(self, request: Request, choices: list[int], code: str, reason: str) -> None:
        """A request ends with an error, which is the end of these choices."""
        draft = self._draft(request)
        draft.deltas += [ChoiceDelta(choice, [], finish_reason="error") for choice in choices]
        draft.error_code, draft.error = code, reason

    def over(self, request: Request) -> None:
        """The last of a request's sequences has ended."""
        draft = self._draft(request)
        draft.timing = request.timing()
        draft.is_last = True

    def drop(self, request: Request) -> None:
        """Its client does not want to hear of it."""
        self._drafts.pop(request, None)

    def take(self) -> list[tuple[RequestKey, RequestOutput]]:
        """All messages since the last call."""
        drafts, self._drafts = self._drafts, {}
        return [(request.key, _message(request, draft)) for request, draft in drafts.items()]

    def _draft(self, request: Request) -> _Draft:
        draft = self._drafts.get(request)
        if draft is None:
            draft = self._drafts[request] = _Draft()
        return draft


def _message(request: Request, draft: _Draft) -> RequestOutput:
    return RequestOutput(
        request_id=request.key.request_id,
        deltas=draft.deltas,
        num_cached_tokens=request.num_cached_tokens,
        engine_seconds=request.engine_ns / 1e9,
        finished=draft.is_last,
        timing=draft.timing,
        error_code=draft.error_code,
        error=draft.error,
    )
