"""Questions to the engine that wait for their answers, by number and with a timeout."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from engine.errors import EngineUnavailable

T = TypeVar("T")


class PendingAnswers:
    """Belongs to one event loop."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._call_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, send: Callable[[int], bool], answer_type: type[T]) -> T:
        """Send a question by its number, and wait for what `answer` is given.

        Raises `EngineUnavailable` where it cannot be sent, or no answer comes in time.
        """
        call_id = next(self._call_ids)
        if not send(call_id):
            raise EngineUnavailable("the engine is not there")
        waiting = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout):
                answer = await waiting
        except TimeoutError:
            raise EngineUnavailable("the engine did not answer in time") from None
        finally:
            self._waiting.pop(call_id, None)
        assert isinstance(answer, answer_type)
        return answer

    def answer(self, call_id: int, answer: object) -> None:
        """An answer came, maybe too late."""
        waiting = self._waiting.get(call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, reason: str, kind: type[EngineUnavailable] = EngineUnavailable) -> None:
        """No answer will come any more."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(kind(reason))
