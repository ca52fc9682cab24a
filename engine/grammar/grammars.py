"""Compiled grammars of one engine, and the tokens that they allow next.

The library is llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over a lexer
of regular-expression derivatives, so that a mask is computed when it is needed and compiling is
cheap. It lets go of the interpreter's lock while it compiles.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import structlog
from numpy.typing import NDArray

from engine.grammar.compile_queue import CompileQueue
from engine.grammar.cursor import GrammarCursor
from engine.grammar.limits import parser_limits
from engine.text.errors import TokenizerError
from engine.text.tokenizer_files import read_backend, read_config

CACHE_BYTES = 128 * 2**20
_ENTRY_BYTES = 4 * 2**20
_BYTES_PER_CHAR = 40
"""Assumed size of a compiled grammar, with the states that its use adds: measured, generously."""


class GrammarError(Exception):
    """A grammar that cannot be compiled, or that a row can no longer follow."""


class Grammars:
    """Compiles on a thread of its own; `follow` is the step loop's, and never waits."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._words = np.zeros((1, (tokenizer.vocab_size + 31) // 32), dtype=np.int32)
        self._lock = threading.Lock()
        """Guards `_waiting`, `_compiled` and `_num_bytes`, which two threads change."""
        self._waiting: dict[str, Future[llguidance.LLMatcher]] = {}
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        self._num_bytes = 0
        self._queue: CompileQueue[Future[llguidance.LLMatcher]] = CompileQueue()
        self._thread = ThreadPoolExecutor(1, "grammar")

    @classmethod
    def from_pretrained(
        cls, model_dir: Path, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> "Grammars | None":
        """Read a model folder's tokenizer; None if it has none that fits, which is logged.

        `vocab_size` is that of the logits; ids that have no token are never allowed. For large
        vocabularies this takes up to a second and holds the interpreter's lock, so it must not be
        called from the step loop.
        """
        try:
            backend = read_backend(model_dir, read_config(model_dir))
            tokenizer = llguidance.LLTokenizer(
                backend.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except (TokenizerError, ValueError) as error:  # all else is served as ever
            log = structlog.get_logger("engine.grammar")
            log.warning("no structured output with this tokenizer", reason=str(error))
            return None
        return cls(tokenizer, vocab_size)

    def prepare(self, grammar: str, tenant: str = "") -> None:
        """Begin to compile a grammar; called when a request arrives, long before its first draw."""
        self._future(grammar, tenant)

    def follow(self, cursor: GrammarCursor, output: Sequence[int]) -> bool:
        """Move `cursor` over `output`, all tokens so far, and set its mask.

        Returns False while the grammar is being compiled: ask again in a later step. Raises
        `GrammarError`.

        Copies of a matcher share a lexer with limits, which other rows may have used up. So a
        failure drops the compiled grammar, and the row starts anew, once, with a fresh one.
        """
        try:
            return self._follow(cursor, output)
        except GrammarError:
            if cursor.matcher is None:  # it cannot be compiled
                raise
            self._drop(cursor.grammar)
            if cursor.has_started_anew:
                raise
            cursor.has_started_anew, cursor.matcher, cursor.num_followed = True, None, 0
            self._future(cursor.grammar, cursor.tenant)
            return False

    def _follow(self, cursor: GrammarCursor, output: Sequence[int]) -> bool:
        if cursor.matcher is None:
            future = self._future(cursor.grammar, cursor.tenant)
            if not future.done():
                return False
            cursor.matcher = future.result().deep_copy()
        matcher: llguidance.LLMatcher = cursor.matcher
        fresh = output[cursor.num_followed :]
        if fresh and not matcher.consume_tokens(list(fresh)):
            raise GrammarError(f"the output left its grammar: {matcher.get_error()}")
        cursor.num_followed = len(output)
        cursor.mask = self._mask(matcher)
        return True

    def _future(self, grammar: str, tenant: str = "") -> "Future[llguidance.LLMatcher]":
        with self._lock:
            future = self._compiled.get(grammar)
            if future is not None:
                self._compiled.move_to_end(grammar)
                return future
            future = self._waiting.setdefault(grammar, Future())
        # It may wait for another tenant's turn already; this tenant's may come earlier.
        if self._queue.put(tenant, grammar, future):
            self._thread.submit(self._compile_next)
        return future

    def _compile_next(self) -> None:
        grammar, future = self._queue.take()
        if future.done():  # it was compiled in another tenant's turn
            return
        matcher: llguidance.LLMatcher | None = None
        failure: BaseException | None = None
        try:
            matcher = self._compile(grammar)
        except BaseException as error:  # as an executor does: whatever it is, who draws is told
            failure = error
        with self._lock:
            if matcher is not None:
                future.set_result(matcher)
            else:
                future.set_exception(failure)
            del self._waiting[grammar]
            self._compiled[grammar] = future
            self._num_bytes += _cost(grammar)
            while self._num_bytes > CACHE_BYTES and len(self._compiled) > 1:
                evicted, _ = self._compiled.popitem(last=False)
                self._num_bytes -= _cost(evicted)

    def _drop(self, grammar: str) -> None:
        with self._lock:
            if self._compiled.pop(grammar, None) is not None:
                self._num_bytes -= _cost(grammar)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=parser_limits()
        )
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        # Copies share the lexer's states, and the very first mask costs the most: compute it here.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher

    def _mask(self, matcher: Any) -> NDArray[np.bool_]:
        words = self._words
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        bits = np.unpackbits(words.view(np.uint8)[0], count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)


def _cost(grammar: str) -> int:
    return _ENTRY_BYTES + _BYTES_PER_CHAR * len(grammar)
