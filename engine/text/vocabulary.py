"""What single tokens are: their bytes, whether they show, and how their tokenizer joins them."""

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CONTEXT_SAMPLES = ("a", "e", "the", "0", ".")


class Vocabulary:
    """The decoding side of one model's tokenizer, shared by all its detokenizers.

    Two kinds of tokenizers are told apart by their decoder:

    - byte-level (GPT-2, SmolLM, Llama 3, Qwen): a text is the UTF-8 of its tokens' bytes joined;
    - all others, of which Llama 2's is typical: tokens are pieces of text, the first one loses its
      leading space, and tokens such as `<0xF0>` are single bytes. A run of those is decoded as a
      whole: if it is not valid UTF-8, every byte of it becomes U+FFFD.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        decoder_types = _decoder_types(backend)
        self.is_byte_level = decoder_types == ["ByteLevel"]
        self._falls_back_to_bytes = "ByteFallback" in decoder_types
        self._byte_of_char = _byte_level_alphabet() if self.is_byte_level else {}
        self._bytes_of_token: dict[int, bytes] = {}
        self._whole_texts: tuple[dict[int, str | None], dict[int, str | None]] = {}, {}
        """By token id: with special tokens shown, and with them skipped."""
        self.context_token_id = self._find_context_token()
        """A token that can stand for any preceding text, so that the next keeps its space."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Ids to text as at the start of a text; ids without a token are skipped."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether `decode` looks at this id at all."""
        if token_id in self._special_ids:
            return not skip_special_tokens
        return self.backend.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a fallback run."""
        if not self._falls_back_to_bytes:
            return False
        token = self.backend.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes in mid-text; they may be part of a character. b"" for an unknown id."""
        found = self._bytes_of_token.get(token_id)
        if found is None:
            found = self._bytes_of_token[token_id] = self._make_token_bytes(token_id)
        return found

    def whole_text(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """A token's text between whole characters; None if it begins or ends within one.

        "" for tokens that are not visible.
        """
        texts = self._whole_texts[skip_special_tokens]
        try:
            return texts[token_id]
        except KeyError:
            text = texts[token_id] = self._make_whole_text(token_id, skip_special_tokens)
            return text

    def _make_whole_text(self, token_id: int, skip_special_tokens: bool) -> str | None:
        if not self.is_visible(token_id, skip_special_tokens):
            return ""
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def _make_token_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            values = [self._byte_of_char.get(char) for char in token]
            known = [value for value in values if value is not None]
            # As the byte-level decoder does: a token with a foreign character is plain text.
            return bytes(known) if len(known) == len(values) else token.encode()
        if self.is_byte(token_id):
            return bytes([int(token[3:5], 16)])
        context = [] if self.context_token_id is None else [self.context_token_id]
        before = self.decode(context, skip_special_tokens=False)
        return self.decode([*context, token_id], skip_special_tokens=False)[len(before) :].encode()

    def _find_context_token(self) -> int | None:
        for text in _CONTEXT_SAMPLES:
            for token_id in self.backend.encode(text, add_special_tokens=False).ids:
                once = self.decode([token_id], skip_special_tokens=True)
                twice = self.decode([token_id, token_id], skip_special_tokens=True)
                if once.strip() and twice.startswith(once) and not self.is_byte(token_id):
                    return token_id
        return None


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    decoder: Any = backend.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts]


def _byte_level_alphabet() -> dict[str, int]:
    # GPT-2's `bytes_to_unicode`: printable bytes are themselves, the others follow from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet
