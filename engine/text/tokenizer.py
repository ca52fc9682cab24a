"""A model's tokenizer and chat template, without transformers (whose import brings torch)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from engine.text.chat_template import ChatTemplate
from engine.text.detokenizer import ByteLevelDetokenizer, Detokenizer, PieceDetokenizer
from engine.text.errors import ChatTemplateError
from engine.text.tokenizer_files import (
    named_special_tokens,
    read_backend,
    read_chat_templates,
    read_config,
)
from engine.text.vocabulary import Vocabulary


class Tokenizer:
    """Text to ids and back, equal to what transformers does for the same model folder."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_templates: Mapping[str, ChatTemplate],
        special_tokens: Mapping[str, str],
    ) -> None:
        self.special_tokens = dict(special_tokens)
        """What chat templates are given, by name (`bos_token`)."""
        self._backend = backend
        self._vocabulary = Vocabulary(backend)
        self._chat_templates = dict(chat_templates)

    @classmethod
    def from_pretrained(cls, model_dir: Path) -> Self:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template.

        Raises TokenizerError for files that are missing or damaged, and ChatTemplateError for a
        template that does not compile.
        """
        config = read_config(model_dir)
        backend = read_backend(model_dir, config)
        special_tokens = named_special_tokens(config)
        return cls(
            backend,
            {
                name: ChatTemplate(source, special_tokens)
                for name, source in read_chat_templates(model_dir, config).items()
            },
            special_tokens,
        )

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._chat_templates)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows the model what tools it may call."""
        template = self._tool_template
        return template is not None and template.takes_tools

    def template_has(self, text: str) -> bool:
        """Whether the template that is used with tools has this text in it."""
        template = self._tool_template
        return template is not None and text in template.source

    @property
    def _tool_template(self) -> ChatTemplate | None:
        templates = self._chat_templates
        return templates.get("tool_use") or templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids. Special tokens that `text` spells out are recognised."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None if there is no such token."""
        return self._backend.token_to_id(token)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text, as at the start of a text; ids that have no token are skipped."""
        return self._vocabulary.decode(token_ids, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Messages, of plain JSON values, to prompt ids. Raises ChatTemplateError."""
        text = self._chat_template(tools is not None).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs or {},
        )
        return self.encode(text, add_special_tokens=False)

    def new_detokenizer(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A detokenizer for one choice that continues this prompt.

        Its text is what the output adds to the prompt's text: a leading space stays where the
        prompt has text before it.
        """
        if self._vocabulary.is_byte_level:
            return ByteLevelDetokenizer(self._vocabulary, skip_special_tokens)
        context: list[int] = []
        if self._vocabulary.context_token_id is not None and any(
            self._vocabulary.is_visible(token_id, skip_special_tokens)
            for token_id in reversed(prompt_token_ids)
        ):
            context = [self._vocabulary.context_token_id]
        return PieceDetokenizer(self._vocabulary, context, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token as text, in mid-sentence: a leading space stays; half a character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token's UTF-8 bytes, which may be part of a character; b"" for an unknown id."""
        return self._vocabulary.token_bytes(token_id)

    def _chat_template(self, has_tools: bool) -> ChatTemplate:
        if not self._chat_templates:
            raise ChatTemplateError(
                "no_chat_template",
                "the model has no chat template: use /v1/completions, or a chat model",
            )
        if has_tools and "tool_use" in self._chat_templates:
            return self._chat_templates["tool_use"]
        if "default" not in self._chat_templates:
            raise ChatTemplateError(
                "no_chat_template",
                f"none of the model's chat templates {sorted(self._chat_templates)} is the default",
            )
        return self._chat_templates["default"]
