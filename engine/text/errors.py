"""Exceptions of the text side.

TextError
├── TokenizerError       the model folder's tokenizer is missing, damaged, or of an unknown kind
└── ChatTemplateError    no chat template, a broken one, or one that refuses these messages
"""

from engine.errors import EngineError


class TextError(EngineError):
    """Base of the text side's errors."""


class TokenizerError(TextError):
    """The model folder's tokenizer cannot be used."""


class ChatTemplateError(TextError):
    """Messages could not be turned into a prompt.

    `code` is a stable reason code: `no_chat_template`, `invalid_chat_template` (the model's fault),
    or `invalid_messages` (the template refuses these messages, or they lack what it needs).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
