"""Calls in what the model says: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

import json
import uuid
from collections.abc import Collection
from typing import Any, NamedTuple, cast

from loraplex.openai.tools import CALL_CLOSES, CALL_OPENS, CalledFunction, ToolCall


class Parsed(NamedTuple):
    """What a piece of text adds to a reply."""

    content: str
    calls: list[ToolCall]


class ToolCallParser:
    """Takes one choice's text as it grows, and tells calls from content.

    A call is reported once it is complete. What looks like one and is none, for it is no JSON,
    names no function of `names`, or is cut off, stays content, to the letter. White space around
    calls belongs to neither.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._buffer = ""
        self._is_in_call = False
        self._searched = 0
        """Characters of the buffer in which no call ends."""
        self._space = ""
        """White space that may yet turn out to surround a call."""
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool) -> Parsed:
        """Add text; with `is_last` nothing is held back."""
        self._buffer += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while self._take_call(calls, content) if self._is_in_call else self._take_text(content):
            pass
        if is_last:
            content.append(self._rest(calls))
        return Parsed("".join(content), calls)

    def _take_text(self, content: list[str]) -> bool:
        """Whether a call begins after it."""
        text, opens, rest = self._buffer.partition(CALL_OPENS)
        if opens:
            self._is_in_call, self._buffer, self._searched = True, rest, 0
        else:
            kept = _overlap(text, CALL_OPENS)
            text, self._buffer = text[: len(text) - kept], text[len(text) - kept :]
        text = self._space + text
        shown = text.rstrip()
        content.append(shown)
        self._space = text[len(shown) :]
        return bool(opens)

    def _take_call(self, calls: list[ToolCall], content: list[str]) -> bool:
        """Whether it is over."""
        end = self._buffer.find(CALL_CLOSES, self._searched)
        if end < 0:
            self._searched = max(self._searched, len(self._buffer) - len(CALL_CLOSES) + 1)
            return False
        body = self._buffer[:end]
        call = self._call(body)
        if call is None and _is_open_json(body):
            self._searched = end + 1  # the end is part of a string
            return True
        self._buffer, self._is_in_call = self._buffer[end + len(CALL_CLOSES) :], False
        if call is None:
            content.append(f"{self._space}{CALL_OPENS}{body}{CALL_CLOSES}")
        else:
            calls.append(call)
        self._space = ""
        return True

    def _rest(self, calls: list[ToolCall]) -> str:
        text, self._buffer = self._buffer, ""
        space, self._space = self._space, ""
        if self._is_in_call:
            self._is_in_call = False
            call = self._call(text)  # ended by the model's stop token
            if call is not None:
                calls.append(call)
                return ""
            return f"{space}{CALL_OPENS}{text}"
        return "" if self.num_calls and not text else space + text

    def _call(self, body: str) -> ToolCall | None:
        try:
            value: Any = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        call = cast(dict[str, Any], value)
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        self.num_calls += 1
        return ToolCall(
            id=f"call_{uuid.uuid4().hex[:24]}",
            function=CalledFunction(name, json.dumps(arguments, ensure_ascii=False)),
        )


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _is_open_json(text: str) -> bool:
    """Whether `text` ends within a string, so that more of it may make it JSON."""
    is_in_string = is_escaped = False
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = is_in_string
        elif char == '"':
            is_in_string = not is_in_string
    return is_in_string
