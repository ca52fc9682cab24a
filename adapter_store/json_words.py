"""msgspec's messages in the words of JSON: who sends JSON need not know Python's types."""

import re

_TYPES = re.compile(r"\b(Expected|got) `([a-z| ]+)`")
_WORDS = {
    "bool": "boolean", "bytes": "string", "datetime": "string", "dict": "object", "float": "number",
    "int": "integer", "list": "array", "str": "string",
}  # fmt: skip


def in_json_words(message: str) -> str:
    """Return a validation message with `string` for `str`, `integer` for `int`, and so on."""
    return _TYPES.sub(_translate, message)


def _translate(found: re.Match[str]) -> str:
    words = dict.fromkeys(_WORDS.get(word, word) for word in found[2].split(" | "))
    return f"{found[1]} `{' | '.join(words)}`"
