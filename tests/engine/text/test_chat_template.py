from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.text.chat_template import ChatTemplate
from engine.text.errors import ChatTemplateError
from tests.support.tiny_tokenizers import CHATML

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": 'Say <b>"hi"</b> & é'},
    {"role": "assistant", "content": "  hi  "},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "é": ["<a>", 1.5, None]}},
    }
]

# Every feature that the environment adds to plain Jinja, or that published templates lean on.
TEMPLATES = {
    "chatml": CHATML,
    "trim_and_lstrip_blocks": (
        "{%- for m in messages %}\n    {% if loop.first %}\n{{ bos_token }}\n    {% endif %}\n"
        "[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}\n{{ eos_token }}\n"
    ),
    "loop_controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% set ns.last = m['role'] %}{% endfor %}{{ ns.n }} {{ ns.last }}"
    ),
    "tools": (
        "{% if tools is not none %}{{ tools | tojson }}|{{ tools[0] | tojson(indent=2) }}|"
        "{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}{% else %}none{% endif %}"
        "{{ messages[0].content }}"
    ),
    "generation": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}"
        "{{ x is defined }}{% endfor %}"
    ),
    "macro_and_slices": (
        "{% macro show(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
        "{% for m in messages[1:] %}{{ show(m) }}{% endfor %}"
        "{{ messages[::-1][0].content.strip().split('h') }}"
    ),
    "dict": (
        "{% set d = dict(a=1, **{'b': 2}) %}{{ d | tojson }}{{ dict.fromkeys(['x'], 3) }}"
        "{{ messages[0].content }}"
    ),
    "date": "{{ strftime_now('%Y') }} {{ messages[-1].content }}",
    "undefined_is_falsy": (
        "{% if documents %}docs{% endif %}{% if enable_thinking %}think{% endif %}"
        "{{ nothing }}{{ messages[0].get('name', 'nobody') }}{{ messages[0].content }}"
    ),
    "reasoning": (
        "{% for m in messages %}{{ m.reasoning_content or '-' }}{{ m.thinking or '-' }}"
        "{{ m.content }}{% endfor %}"
    ),
}


def rendered(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "tools": None,
        "template_kwargs": {},
        **options,
    }
    return ChatTemplate(source, SPECIAL).render(messages, **options)


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    kwargs = options.pop("template_kwargs", {})
    options.setdefault("add_generation_prompt", True)
    texts, _ = render_jinja_template(
        conversations=[messages], chat_template=source, **{**SPECIAL, **kwargs}, **options
    )
    return texts[0]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": TOOLS},
        {"template_kwargs": {"enable_thinking": True, "eos_token": "<end>"}},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_templates_render_as_in_transformers(name, options):
    source = TEMPLATES[name]
    try:
        expected = reference(source, CHAT, **options)
    except ValueError:
        # The template does not show the final message, so it cannot be continued.
        with pytest.raises(ChatTemplateError):
            rendered(source, CHAT, **options)
    else:
        assert rendered(source, CHAT, **options) == expected
        assert expected


def test_a_final_message_is_continued_where_it_ends():
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = rendered(CHATML, [*CHAT[:2], {"role": "assistant", "content": "It is "}], **options)
    assert text.endswith("<|im_start|>assistant\nIt is ")
    trimming = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert rendered(trimming, [{"role": "user", "content": "It is "}], **options) == "[It is"


def test_content_parts_are_continued_at_the_last_text():
    source = "{% for p in messages[0].content %}{{ p.text }};{% endfor %}"
    chat = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(source, chat, **options) == reference(source, chat, **options) == "a;b"
    assert chat[0]["content"][1] == {"type": "text", "text": "b"}


def test_null_fields_are_as_absent():
    chat = [{"role": "user", "content": "x", "name": None, "tool_calls": None}]
    source = "{{ messages[0].name is defined }}{{ 'tool_calls' in messages[0] }}"
    assert rendered(source, chat) == "FalseFalse"


def test_reasoning_goes_by_every_name():
    for name in ("reasoning_content", "thinking", "reasoning"):
        chat = [{"role": "assistant", "content": "c", name: "why"}]
        expected = reference(TEMPLATES["reasoning"], chat)
        assert rendered(TEMPLATES["reasoning"], chat) == expected == "whywhyc"


def test_a_template_changes_no_ones_messages():
    chat = [{"role": "user", "content": "x", "list": [1]}]
    with pytest.raises(ChatTemplateError):
        rendered("{{ messages[0].list.append(2) }}", chat)
    assert chat == [{"role": "user", "content": "x", "list": [1]}]


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHAT, "roles must alternate"),
        ("{{ messages[7].content }}", CHAT, "refuses"),
        ("{{ messages[0].content + 1 }}", CHAT, "refuses"),
        ("{{ messages[0].missing.deeper }}", CHAT, "missing"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "refuses"),
        ("{{ dict.__class__.__mro__ }}", CHAT, "refuses"),
        ("{{ namespace(_x=1) }}", CHAT, "_x"),
        ("{{ namespace.__init__.__globals__ }}", CHAT, "refuses"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", CHAT, "_x"),
        (CHATML, [], "no message"),
        (CHATML, [{"role": "user"}], "refuses"),
    ],
)
def test_what_a_template_refuses_is_a_clear_error(source, messages, reason):
    with pytest.raises(ChatTemplateError) as caught:
        rendered(source, messages)
    assert caught.value.code == "invalid_messages"
    assert reason in caught.value.message


def test_a_message_that_cannot_be_continued_is_a_clear_error():
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for source, message in (
        (CHATML, {"role": "assistant", "tool_calls": []}),
        (CHATML, {"role": "assistant", "content": []}),
        ("{{ messages | length }} content", {"role": "assistant", "content": "x"}),
    ):
        with pytest.raises(ChatTemplateError) as caught:
            rendered(source, [message], **options)
        assert caught.value.code == "invalid_messages"
    with pytest.raises(ChatTemplateError, match="exclude"):
        rendered(CHATML, CHAT, continue_final_message=True)


def test_a_broken_template_is_refused_at_load():
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate("{% for m in %}", SPECIAL)
    assert caught.value.code == "invalid_chat_template"


def test_the_date_is_todays():
    assert rendered("{{ strftime_now('%Y-%m') }}", CHAT) == datetime.now().strftime("%Y-%m")
