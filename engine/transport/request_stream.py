"""One request's outputs on their way to the task that reads them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from engine.errors import EngineError, EngineUnavailable
from engine.messages import ChoiceDelta, RequestOutput

T = TypeVar("T")


class RequestStream:
    """A request's outputs, for one reader: `listen` and `take`, or iterate.

    A reader that falls behind gets what it missed merged into one output. So a slow reader costs
    memory for its own tokens, and no further object for every step.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = loop.create_future()
        self._pending: list[RequestOutput] = []
        self._error: EngineError | None = None
        self._ended = False
        self._changed = asyncio.Event()
        self._on_change: Callable[[], object] = self._changed.set

    async def wait_accepted(self) -> None:
        """Wait until the request is queued; raises what `fail` was given."""
        await self._accepted

    def accept(self) -> None:
        """The engine has queued the request."""
        if not self._accepted.done():
            self._accepted.set_result(None)

    def push(self, output: RequestOutput) -> None:
        """Give the reader an output; those after a `finished` one are dropped."""
        if self._ended:
            return
        self._pending.append(output)
        self._ended = output.finished
        self._on_change()

    def fail(self, error: EngineError) -> None:
        """End with an error, which the reader gets after the outputs that came before it."""
        if self._ended:
            return
        self._error = error
        self._ended = True
        self._on_change()
        self._refuse(error)

    def end(self) -> None:
        """End because this side has aborted the request: without an error, if it was accepted."""
        self._ended = True
        self._on_change()
        self._refuse(EngineUnavailable("the request was aborted"))

    def listen(self, on_change: Callable[[], object]) -> None:
        """Have `on_change` called whenever `take` has something new, instead of iterating."""
        self._on_change = on_change
        if self._pending or self._ended:
            on_change()

    def take(self) -> RequestOutput | None:
        """What has come since the last call, merged; None if nothing has, or after the end.

        Raises what `fail` was given, once everything before it was taken.
        """
        if self._pending:
            outputs, self._pending = self._pending, []
            return merge_outputs(outputs)
        if self._error is not None:
            raise self._error
        return None

    @property
    def is_over(self) -> bool:
        """Whether the stream has ended and every output was taken."""
        return self._ended and not self._pending

    def _refuse(self, error: EngineError) -> None:
        if not self._accepted.done():
            self._accepted.set_exception(error)
            # Read it once here: a task that was cancelled meanwhile never will.
            self._accepted.exception()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while (output := self.take()) is None:
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return output


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output that says the same as several consecutive ones of a request; at least one."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    by_choice: dict[int, list[ChoiceDelta]] = {}
    for output in outputs:
        for delta in output.deltas:
            by_choice.setdefault(delta.index, []).append(delta)
    return RequestOutput(
        request_id=last.request_id,
        deltas=[_merge_deltas(deltas) for deltas in by_choice.values()],
        num_cached_tokens=max(output.num_cached_tokens for output in outputs),
        engine_seconds=max(output.engine_seconds for output in outputs),
        finished=last.finished,
        timing=next((o.timing for o in reversed(outputs) if o.timing is not None), None),
        error_code=last.error_code,
        error=last.error,
    )


def _merge_deltas(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    last = deltas[-1]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return ChoiceDelta(
        index=last.index,
        token_ids=_joined(delta.token_ids for delta in deltas),
        logprobs=_joined(logprobs) if logprobs else None,
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
    )


def _joined(parts: Iterable[list[T]]) -> list[T]:
    return [item for part in parts for item in part]
