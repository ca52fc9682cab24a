"""One call's requests to the engine: queued together, read together, ended together.

Outputs become text here (detokenised, cut at stop strings); how the text is sent is not known here.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import msgspec

from engine.client import EngineClient
from engine.messages import (
    AbortReason,
    ChoiceDelta,
    EngineRequest,
    RequestOutput,
    RequestTiming,
    TokenLogprob,
)
from engine.text.text_stream import TextStream
from engine.transport.request_stream import RequestStream
from loraplex.ending_calls import TENANT_SUSPENDED, VERSION_DELETED
from loraplex.errors import ApiError, adapter_unavailable
from loraplex.openai.deadline import Deadline
from loraplex.openai.grammar_checks import unfollowable
from loraplex.openai.replies import FinishReason


class Piece(NamedTuple):
    """What one choice gained: text, or its end, or both."""

    choice_index: int
    text: str
    logprobs: list[TokenLogprob]
    """Of the tokens whose text is in `text`; empty where none were asked for."""
    finish_reason: FinishReason | None


Sink = Callable[[list[Piece]], bool]
"""Takes pieces at once, or says that it cannot."""


def refuse(pieces: list[Piece]) -> bool:
    """A sink that takes nothing."""
    return False


class Choice:
    """One answer, growing. `index` counts over all prompts of the call."""

    def __init__(self, index: int, stream: TextStream, *, shows_stop: bool) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self._shows_stop = shows_stop
        self._held: deque[TokenLogprob] = deque()
        """Log-probabilities of tokens whose text is held back."""

    def push(self, delta: ChoiceDelta) -> Piece | None:
        """Add tokens; None if nothing can be shown yet, or any more."""
        if self.finish_reason is not None:
            return None
        is_last = delta.finish_reason is not None
        released = self._stream.push(delta.token_ids, is_last, delta.stop_token_id)
        self.num_tokens += released.num_tokens
        has_logprobs = delta.logprobs is not None or self._held
        logprobs = self._release(delta, released.num_tokens) if has_logprobs else []
        if released.stopped_by is not None:
            self.finish_reason = "stop"
        elif is_last:
            self.finish_reason = cast(FinishReason, delta.finish_reason)
            if delta.stop_token_id is not None and logprobs and not self._shows_stop:
                logprobs.pop()  # counted, but it has no text
        if not (released.text or logprobs or self.finish_reason):
            return None
        return Piece(self.index, released.text, logprobs, self.finish_reason)

    def _release(self, delta: ChoiceDelta, num_tokens: int) -> list[TokenLogprob]:
        if delta.logprobs is not None:
            self._held.extend(delta.logprobs)
        return [self._held.popleft() for _ in range(min(num_tokens, len(self._held)))]


class Generation:
    """Drives requests of equal `n`; `choices` has `n` of them for each request, in order."""

    def __init__(
        self,
        engine: EngineClient,
        requests: Sequence[EngineRequest],
        choices: Sequence[Choice],
        grammar_field: str | None = None,
    ) -> None:
        """`grammar_field` is the request's field that the choices' grammar came in."""
        self.choices = choices
        self.num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._engine = engine
        self._requests = requests
        self._grammar_field = grammar_field
        self._n = len(choices) // len(requests)
        self._open = set(range(len(requests)))
        self._cached = [0] * len(requests)
        self._engine_seconds = [0.0] * len(requests)
        self._timings: dict[int, RequestTiming] = {}
        """What the engine said last,"""
        self._timed_at: dict[int, float] = {}
        """and when."""
        self._last_of = [0.0] * len(requests)
        """When each request's last output came."""
        self._streams: list[RequestStream] = []
        self._waiter: asyncio.Future[list[Piece]] | None = None
        self._sink: Sink = refuse
        self._is_aborted = False
        self._is_given_up = False
        self._error: Exception | None = None
        """To be raised once what came before it has been returned."""
        self._deadline: asyncio.TimerHandle | None = None
        self.has_expired = False
        """Whether the deadline came before the end."""
        self._started = self._first = self._last = time.monotonic()
        self._has_output = False

    @property
    def is_done(self) -> bool:
        """Whether every choice has its finish reason."""
        return not self._open and not self._is_aborted

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(self._cached)

    @property
    def engine_seconds(self) -> float:
        """The call's share of the engine's steps, as of the last output."""
        return sum(self._engine_seconds)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices that the client was, or could have been, shown."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def timing(self) -> RequestTiming:
        """The slowest request's timing. Measured here as far as the engine sent none: it does not
        see the end of a text that is cut at a stop string."""
        if self._timings:
            timings = map(self._timing_of, self._timings)
            return max(timings, key=lambda t: t.queue_seconds + t.prefill + t.decode)
        return RequestTiming(
            queue={}, prefill=self._first - self._started, decode=self._last - self._first
        )

    async def start(self) -> None:
        """Queue all requests; if one is refused none stays. Raises `EngineError`."""
        try:
            accepted = await asyncio.gather(
                *(self._engine.generate(request) for request in self._requests),
                return_exceptions=True,
            )
        except BaseException:
            self.abort()
            raise
        for outcome in accepted:
            if isinstance(outcome, BaseException):
                self.abort()
                raise outcome
            self._streams.append(outcome)
        self._started = self._first = self._last = time.monotonic()
        for stream in self._streams:
            stream.listen(self._wake)

    async def next(self, sink: Sink = refuse) -> list[Piece]:
        """What arrived since the last call; [] once done or aborted.

        What arrives while this waits is offered to `sink`, in the very turn of the event loop that
        brought it: waking a task for each token would cost as much as the token's text. What it
        refuses is returned, and so are the call's last pieces.

        Raises `EngineError` or `ApiError` when the engine gives the call up.
        """
        self._sink = sink
        while self._is_underway:
            if pieces := self._take():
                return pieces
            if self._is_underway:
                self._waiter = asyncio.get_running_loop().create_future()
                if pieces := await self._waiter:
                    return pieces
        if self._is_given_up and self._error is not None:
            raise self._error
        return []

    def end_at(self, deadline: Deadline) -> None:
        """Give up what is not over by then: `next` raises 504."""
        if deadline.at is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_at(deadline.at, self._expire, deadline)

    def _expire(self, deadline: Deadline) -> None:
        if self._open and not self._is_aborted:
            self.has_expired = True
            self.give_up(deadline.exceeded())

    def give_up(self, error: Exception) -> None:
        """End what is not over: `next` raises the error."""
        if self._open and not self._is_aborted:
            self._is_given_up = True
            self._error = error
            self.abort()

    def abort(self) -> None:
        """End what is not over. Synchronous, and harmless at any time."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._open:
            self._is_aborted = True
        for number in self._open:
            self._abort_request(number, "timeout" if self.has_expired else "abort")
        self._wake()

    @property
    def _is_underway(self) -> bool:
        return bool(self._open) and not self._is_aborted

    def _wake(self) -> None:
        # Taking may abort a request, whose stream then calls this again: there is nobody to wake.
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        pieces: list[Piece] = []
        try:
            if self._is_underway:
                pieces = self._take()
                goes_on = self._is_underway and self._error is None
                if goes_on and (not pieces or self._sink(pieces)):
                    self._waiter = waiter
                    return
        except Exception as error:  # for whoever waits, not for the engine that delivers
            self._error, pieces = error, []
        waiter.set_result(pieces)

    def _take(self) -> list[Piece]:
        """What is there; raises once nothing precedes the error."""
        if self._error is not None:
            raise self._error
        pieces: list[Piece] = []
        try:
            for number in tuple(self._open):
                stream = self._streams[number]
                if (output := stream.take()) is not None:
                    self._apply(number, output, pieces)
                elif stream.is_over:  # its own side has ended it
                    self._is_aborted = True
        except Exception as error:  # comes after what precedes it
            if not pieces:
                raise
            self._error = error
        return pieces

    def _apply(self, number: int, output: RequestOutput, pieces: list[Piece]) -> None:
        self._note_progress(number, output)
        if output.error_code is not None:
            raise self._failure(output.error_code, output.error)
        first = number * self._n
        has_ended = False
        for delta in output.deltas:
            if delta.finish_reason in ("abort", "error"):
                raise self._failure("engine_stopped", "the engine ended the request")
            choice = self.choices[first + delta.index]
            piece = choice.push(delta)
            if piece is not None:
                pieces.append(piece)
                has_ended = has_ended or piece.finish_reason is not None
        if has_ended and all(c.finish_reason for c in self.choices[first : first + self._n]):
            self._open.discard(number)
            if not output.finished:  # cut at a stop string: the engine does not know of those
                self._abort_request(number, "stop")
        elif output.finished:
            raise self._failure("engine_stopped", "the engine ended the request")

    def _failure(self, code: str, message: str | None) -> ApiError:
        if code == "adapter_unavailable":
            return adapter_unavailable()
        if code == "grammar_failed":
            return unfollowable(self._grammar_field)
        message = message or "the engine could not finish this request"
        headers: dict[str, str] = {}
        if code == "engine_stopped":  # the next one takes as long to start as this one did
            headers["retry-after"] = str(max(1, math.ceil(self._engine.info.start_seconds)))
        return ApiError(_STATUS_OF.get(code, 500), code, message, headers=headers)

    def _abort_request(self, number: int, reason: AbortReason) -> None:
        choices = self.choices[number * self._n : (number + 1) * self._n]
        num_tokens = sum(choice.num_tokens for choice in choices)
        self._engine.abort(self._requests[number].request_id, reason, num_tokens)

    def _timing_of(self, number: int) -> RequestTiming:
        timing, last = self._timings[number], self._last_of[number]
        if last == self._timed_at[number]:
            return timing
        return msgspec.structs.replace(timing, decode=last - self._first)

    def _note_progress(self, number: int, output: RequestOutput) -> None:
        self._last = self._last_of[number] = time.monotonic()
        if not self._has_output:
            self._has_output, self._first = True, self._last
        if output.num_cached_tokens > self._cached[number]:
            self._cached[number] = output.num_cached_tokens
        if output.engine_seconds:
            self._engine_seconds[number] = output.engine_seconds
        if output.timing is not None:
            self._timings[number], self._timed_at[number] = output.timing, self._last


_STATUS_OF = {"engine_stopped": 503, TENANT_SUSPENDED: 403, VERSION_DELETED: 409}
