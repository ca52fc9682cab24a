"""A model's tokenizer and chat template, without transformers (whose import brings torch)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from engine.text.detokenizer import Detokenizer


class Tokenizer:
    """Text to ids and back, as transformers does it for the same model folder."""

    @classmethod
    def from_pretrained(cls, model_dir: Path) -> Self:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template. Raises
        TokenizerError."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Ids that have a token, added tokens included."""
        raise NotImplementedError

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        raise NotImplementedError

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text; ids that have no token are skipped."""
        raise NotImplementedError

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Messages to prompt ids. Raises ChatTemplateError."""
        raise NotImplementedError

    def new_detokenizer(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A detokenizer for one choice that continues this prompt."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """One token as text, in mid-sentence: a leading space stays; half a character is U+FFFD."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """One token's UTF-8 bytes, which may be part of a character."""
        raise NotImplementedError
