"""Whether a grammar can be used, found out before its request is queued."""

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import anyio
import anyio.to_thread
import llguidance

from engine.grammar.limits import parser_limits
from loraplex.errors import ApiError, InvalidRequest
from loraplex.openai.schema_grammar import schema_error

CHECK_SECONDS = 5.0
MAX_KNOWN = 4096
"""Grammars known to be good: 32 bytes each."""


class GrammarChecks:
    """Compiles on a thread, which lets go of the interpreter's lock; few at a time."""

    def __init__(self, seconds: float = CHECK_SECONDS) -> None:
        self._seconds = seconds
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._limiter = anyio.CapacityLimiter(2)

    async def check(self, grammar: str, schemas: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` unless it compiles in time; `schemas` by the field they came in.

        Waiting for others counts not. llguidance's own limits end the work soon after, if its time
        was up.
        """
        digest = sha256(grammar.encode()).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return
        message: str | None = None
        async with self._limiter:
            with anyio.move_on_after(self._seconds):
                message = await anyio.to_thread.run_sync(_problem, grammar, abandon_on_cancel=True)
        if message is None:
            raise ApiError(
                400,
                "schema_too_complex",
                f"the schema could not be compiled in {self._seconds:g} s",
                param=next(iter(schemas)),
            )
        if message:
            raise _refusal(message, schemas)
        self._known[digest] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _problem(grammar: str) -> str:
    """What is wrong with it; "" if nothing is."""
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        grammar, limits=parser_limits()
    )
    return messages[0] if is_error else ""


def _refusal(message: str, schemas: Mapping[str, Any]) -> InvalidRequest:
    return schema_error(message.replace("<non-verbose/>", "").strip(), schemas)
