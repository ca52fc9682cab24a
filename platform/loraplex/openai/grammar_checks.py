"""Whether a grammar can be used, found out before its request is queued."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import anyio
import anyio.to_thread
import llguidance

from engine.grammar.limits import parser_limits
from engine.tenant_turns import TenantTurns
from loraplex.errors import ApiError, InvalidRequest
from loraplex.openai.schema_grammar import schema_error
from loraplex.openai.schema_recursion import endless_part

CHECK_SECONDS = 5.0
MAX_KNOWN = 4096
"""Grammars known to be good: 32 bytes each."""


class GrammarChecks:
    """Compiles on a thread, which lets go of the interpreter's lock; few at a time, and one of each
    tenant, so that its slow schemas hold up no other's."""

    def __init__(self, seconds: float = CHECK_SECONDS) -> None:
        self._seconds = seconds
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._turns = TenantTurns(2)
        self._bytes = llguidance.LLTokenizer("byte")
        """Stands for the engine's tokenizer: where no byte can begin a reply, no token can."""

    async def check(self, tenant: str, grammar: str, schemas: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` unless it compiles in time; `schemas` by the field they came in.

        The wait for its turn does not count. Work whose time is up is not waited for any more;
        llguidance's own limits end it soon after.
        """
        digest = sha256(grammar.encode()).digest()
        if self._is_known(digest):
            return
        is_checked = False
        async with self._turns.of(tenant):
            if self._is_known(digest):  # by the one before
                return
            with anyio.move_on_after(self._seconds):
                await anyio.to_thread.run_sync(
                    _check, grammar, schemas, self._bytes, abandon_on_cancel=True
                )
                is_checked = True
        if not is_checked:
            raise ApiError(
                400,
                "schema_too_complex",
                f"the schema could not be compiled in {self._seconds:g} s",
                param=next(iter(schemas)),
            )
        self._known[digest] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _is_known(self, digest: bytes) -> bool:
        if digest not in self._known:
            return False
        self._known.move_to_end(digest)
        return True


def _check(grammar: str, schemas: Mapping[str, Any], tokenizer: llguidance.LLTokenizer) -> None:
    for field, schema in schemas.items():
        steps = endless_part(schema)
        if steps is not None:
            raise _endless(field, steps)
    limits = parser_limits()
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if is_error:
        raise schema_error(messages[0].replace("<non-verbose/>", "").strip(), schemas)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.get_error():
        raise unfollowable(next(iter(schemas)))


def unfollowable(param: str | None) -> InvalidRequest:
    """Return the refusal of a grammar that compiles, and that no reply could be held to."""
    return InvalidRequest(
        param,
        "the schema allows no reply, or takes too much work for each token: make it simpler",
        code="schema_too_complex",
    )


def _endless(field: str, steps: Sequence[str]) -> InvalidRequest:
    path = field + "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in steps)
    return InvalidRequest(
        path,
        f"`{path}` always contains itself, so that only JSON without an end would fulfil it",
        code="endless_schema",
    )
