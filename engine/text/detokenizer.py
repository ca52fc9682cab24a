"""Tokens to text, one at a time, so that the joined pieces equal the decoding of all tokens."""

import codecs
from typing import Protocol

from tokenizers.decoders import DecodeStream

from engine.text.vocabulary import Vocabulary


class Detokenizer(Protocol):
    """Decodes one choice's output as it comes. Made by `Tokenizer.new_detokenizer`."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text to release now ("" while a character is incomplete)."""
        ...

    @property
    def num_held(self) -> int:
        """Tokens pushed last whose text has not been returned yet."""
        ...

    def flush(self) -> str:
        """End the output; returns the text still held, with an incomplete character as U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """For byte-level tokenizers: UTF-8, decoded incrementally."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_held = 0

    @property
    def num_held(self) -> int:
        """Tokens pushed last whose text has not been returned yet."""
        return self._num_held

    def push(self, token_id: int) -> str:
        """Add a token; the text that can be released now."""
        if not self._num_held:
            whole = self._vocabulary.whole_text(token_id, self._skip_special_tokens)
            if whole is not None:
                return whole
        text = ""
        if self._vocabulary.is_visible(token_id, self._skip_special_tokens):
            text = self._decoder.decode(self._vocabulary.token_bytes(token_id))
        if not self._decoder.getstate()[0]:
            self._num_held = 0
        elif text:
            self._num_held = 1  # it ended one character and began another
        else:
            self._num_held += 1
        return text

    def flush(self) -> str:
        """End of the output: the text still held."""
        self._num_held = 0
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """For all other tokenizers: `tokenizers`' DecodeStream, fed when later tokens cannot matter.

    A run of byte tokens is fed together with the token that ends it, because only then is it known
    whether the run is valid UTF-8. `context` stands for the prompt: without it, the first token
    would lose its leading space.
    """

    def __init__(
        self, vocabulary: Vocabulary, context: list[int], skip_special_tokens: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._window = context  # tokens of the text released last, before which nothing matters
        self._pending: list[int] = []  # visible tokens since then
        self._num_held = 0
        self._stream = self._new_stream()

    @property
    def num_held(self) -> int:
        """Tokens pushed last whose text has not been returned yet."""
        return self._num_held

    def push(self, token_id: int) -> str:
        """Add a token; the text that can be released now."""
        if not self._vocabulary.is_visible(token_id, self._skip_special_tokens):
            self._num_held += 1 if self._pending else 0
            return ""
        self._pending.append(token_id)
        self._num_held += 1
        if self._vocabulary.is_byte(token_id):
            return ""
        text = self._stream.step(self._vocabulary.backend, self._pending)
        if text is None:
            # No text, or text that ends with a real U+FFFD, which DecodeStream takes for half a
            # character and would hold for good.
            return self._release()
        self._forget_pending()
        return text

    def flush(self) -> str:
        """End of the output: the text still held."""
        return self._release() if self._pending else ""

    def _release(self) -> str:
        before = self._vocabulary.decode(self._window, self._skip_special_tokens)
        text = self._vocabulary.decode(
            [*self._window, *self._pending], self._skip_special_tokens
        ).removeprefix(before)
        self._forget_pending()
        self._stream = self._new_stream()
        return text

    def _forget_pending(self) -> None:
        self._window = self._pending
        self._pending = []
        self._num_held = 0

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._window, skip_special_tokens=self._skip_special_tokens)
