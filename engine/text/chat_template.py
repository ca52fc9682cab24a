"""Chat templates: the Jinja environment that transformers renders them in, without transformers.

Templates come with models, so they run in the same immutable sandbox, see plain data only, and have
the same filters, globals and tags (transformers/utils/chat_template_utils.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.text.errors import ChatTemplateError

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Names under which a message's reasoning is passed; templates read the first, gpt-oss the second.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; raises ChatTemplateError (`invalid_chat_template`)."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                "invalid_chat_template", f"the model's chat template is broken: {error}"
            ) from error
        self.takes_tools = "tools" in names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """Messages to prompt text, equal to transformers' `apply_chat_template(tokenize=False)`.

        Raises ChatTemplateError (`invalid_messages`).
        """
        if not messages:
            raise ChatTemplateError("invalid_messages", "there is no message")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "invalid_messages",
                "continue_final_message and add_generation_prompt exclude each other",
            )
        chat = [_plain_message(message) for message in messages]
        final_text = self._tag_final_message(chat) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            **_plain(template_kwargs),
            "messages": chat,
            "tools": None if tools is None else _plain(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(variables)
        except Exception as error:  # a template can raise whatever its expressions can
            raise ChatTemplateError(
                "invalid_messages", f"the chat template refuses these messages: {error}"
            ) from error
        return _cut_at_tag(text, final_text) if continue_final_message else text

    def _tag_final_message(self, chat: list[dict[str, Any]]) -> str:
        content = chat[-1].get("content")
        if content is None or "content" not in self.source:
            raise ChatTemplateError(
                "invalid_messages", "the final message has no content to continue"
            )
        if isinstance(content, str):
            chat[-1]["content"] = content + _CONTINUE_TAG
            return content
        for part in reversed(content if isinstance(content, list) else []):
            if isinstance(part, dict) and "text" in part:
                text = part["text"]
                part["text"] = text + _CONTINUE_TAG
                return text
        raise ChatTemplateError("invalid_messages", "the final message has no text to continue")


def _cut_at_tag(text: str, final_text: str) -> str:
    place = text.rfind(_CONTINUE_TAG.strip())
    if place < 0 or final_text.strip() not in text:
        raise ChatTemplateError(
            "invalid_messages",
            "the chat template does not show the final message as it is, so it cannot be continued",
        )
    if text.startswith(_CONTINUE_TAG, place):
        return text[:place]
    # The template trims messages.
    return text[:place].rstrip()


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    # Clients send `"content": null` and the like, which many templates would print as "None".
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    for name in _REASONING_FIELDS:
        if name in plain:
            return {"thinking": plain[name], **plain, "reasoning_content": plain[name]}
    return plain


def _plain(value: Any) -> Any:
    """A copy made of plain JSON types: a template sees nothing else, and changes no one's data."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
        return {str(key): _plain(item) for key, item in items.items()}
    if isinstance(value, list | tuple):
        sequence: Sequence[Any] = value
        return [_plain(item) for item in sequence]
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    environment.globals.update(names)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict(...)` without the class, whose attributes a template could climb."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    # Positional only, as Jinja's own, so that `namespace(self=...)` works.
    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
