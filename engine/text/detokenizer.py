"""Tokens to text, one at a time."""


class Detokenizer:
    """Decodes one choice's output as it comes. Made by `Tokenizer.new_detokenizer`."""

    def push(self, token_id: int) -> str:
        """Add a token; the text that can be released now ("" while a character is incomplete)."""
        raise NotImplementedError

    @property
    def num_held(self) -> int:
        """Tokens pushed last whose text has not been returned yet."""
        raise NotImplementedError

    def flush(self) -> str:
        """End of the output: the text still held, an incomplete character as U+FFFD."""
        raise NotImplementedError
