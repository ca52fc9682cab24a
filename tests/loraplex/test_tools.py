"""`tools`: told to the model, found in what it says, and demanded where the caller demands it."""

import json
from typing import Any

import openai
import pytest

from loraplex.openai.tool_calls import ToolCallParser
from tests.support.grammar_service import grammar_service
from tests.support.tiny_tokenizers import CHATML, HERMES

pytestmark = pytest.mark.anyio

MESSAGES: list[Any] = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather",
        "parameters": {
            "$defs": {"unit": {"enum": ["C", "F"]}},
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Oslo"]}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"properties": {}, "additionalProperties": False},
    },
}
TOOLS: list[Any] = [WEATHER, CLOCK]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "unit": "C"}}\n</tool_call>'
TIME = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'


def parse(text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that comes in pieces of `size` characters."""
    parser = ToolCallParser(["weather", "clock"])
    content, calls = "", []
    pieces = [text[start : start + size] for start in range(0, len(text), size)] or [""]
    for number, piece in enumerate(pieces):
        parsed = parser.push(piece, is_last=number + 1 == len(pieces))
        content += parsed.content
        calls += [(call.function.name, call.function.arguments) for call in parsed.calls]
    assert parser.num_calls == len(calls)
    return content, calls


BERN = ("weather", '{"city": "Bern", "unit": "C"}')
IN_STRING = '{"name": "weather", "arguments": {"city": "</tool_call> \\" </tool_call>"}}'
SAID: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("", "", []),
    ("  no call <tool> here\n", "  no call <tool> here\n", []),
    (CALL, "", [BERN]),
    (f"\n{CALL}\n{TIME}\n", "", [BERN, ("clock", "{}")]),
    (f"Let me see.\n{CALL}", "Let me see.", [BERN]),
    (f"{CALL} Done.", " Done.", [BERN]),
    (CALL.removesuffix("\n</tool_call>"), "", [BERN]),
    (CALL[:-30], CALL[:-30], []),
    (CALL[:5], CALL[:5], []),
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    (TIME.replace("clock", "rm"), TIME.replace("clock", "rm"), []),
    (TIME.replace("{}", "[1]"), TIME.replace("{}", "[1]"), []),
    ("<tool_call>" * 3 + "</tool_call>" * 2, "<tool_call>" * 3 + "</tool_call>" * 2, []),
    (f"<tool_call>x</tool_call>{TIME}", "<tool_call>x</tool_call>", [("clock", "{}")]),
    (
        f"<tool_call>{IN_STRING}</tool_call>",
        "",
        [("weather", '{"city": "</tool_call> \\" </tool_call>"}')],
    ),
    ('<tool_call>{"name": "clock"}</tool_call>', "", [("clock", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), SAID)
def test_calls_are_told_from_content_however_the_text_comes(text, content, calls):
    for size in (1, 2, 3, 7, 1000):
        assert parse(text, size) == (content, calls), size


def check_calls(calls: Any) -> list[str]:
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.id.startswith("call_") and call.type == "function"
        if call.function.name == "weather":
            assert arguments["city"] in ("Bern", "Oslo") and arguments["unit"] in ("C", "F")
        else:
            assert (call.function.name, arguments) == ("clock", {})
    assert len({call.id for call in calls}) == len(calls) > 0
    return [call.function.name for call in calls]


@pytest.mark.parametrize("choice", ["required", "weather", "clock"])
async def test_a_call_that_is_demanded_is_made_with_arguments_of_the_schema(tmp_path, choice):
    asked: Any = choice
    if choice != "required":
        asked = {"type": "function", "function": {"name": choice}}
    async with grammar_service(tmp_path) as service, service.openai() as client:
        named = set()
        for seed in range(3):
            options: Any = {
                "model": "base", "messages": MESSAGES, "tools": TOOLS, "tool_choice": asked,
                "seed": seed, "n": 2, "max_tokens": 900, "parallel_tool_calls": False,
            }  # fmt: skip
            whole = await client.chat.completions.create(**options)
            for answer in whole.choices:
                assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
                names = check_calls(answer.message.tool_calls)
                assert len(names) == 1
                named.update(names)
            async with client.chat.completions.stream(**options) as stream:
                final = await stream.get_final_completion()
            for answer, streamed in zip(whole.choices, final.choices, strict=True):
                assert streamed.finish_reason == "tool_calls"
                check_calls(streamed.message.tool_calls)
                functions = [call.function for call in streamed.message.tool_calls or []]
                expected = [call.function for call in answer.message.tool_calls or []]  # type: ignore[union-attr]
                assert [(f.name, f.arguments) for f in functions] == [
                    (f.name, f.arguments) for f in expected
                ]
        assert named == ({"weather", "clock"} if choice == "required" else {choice})


async def test_a_demanded_call_that_max_tokens_cuts_is_content(tmp_path):
    async with grammar_service(tmp_path) as service, service.openai() as client:
        reply = await client.chat.completions.create(
            model="base", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=20
        )
        answer = reply.choices[0]
        assert (answer.finish_reason, answer.message.tool_calls) == ("length", None)
        assert (answer.message.content or "").startswith("<tool_call>"[:5])


@pytest.mark.parametrize("choice", [None, "auto"])
async def test_calls_of_the_models_own_are_found_and_streamed_in_order(tmp_path, choice):
    says = f"Let me see.\n{CALL}\n{TIME}"
    options: Any = {"model": "base", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 900}
    if choice is not None:
        options["tool_choice"] = choice
    async with grammar_service(tmp_path, says=says) as service, service.openai() as client:
        whole = (await client.chat.completions.create(**options)).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", "Let me see.")
        assert check_calls(whole.message.tool_calls) == ["weather", "clock"]
        events: list[Any] = []
        reason = None
        async for chunk in await client.chat.completions.create(
            **options, stream=True, logprobs=True
        ):
            for part in chunk.choices:
                reason = part.finish_reason or reason
                if part.delta.content:
                    events.append(part.delta.content)
                events += [(c.index, c.function.name) for c in part.delta.tool_calls or []]
        assert reason == "tool_calls"
        assert events[-2:] == [(0, "weather"), (1, "clock")]
        assert "".join(events[:-2]) == "Let me see."


async def test_a_plain_reply_beside_tools_is_what_it_is_without(tmp_path):
    says = "Hello world, <tool is no call"
    async with grammar_service(tmp_path, says=says) as service, service.openai() as client:
        for tools in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
            options: Any = {"model": "base", "messages": MESSAGES, "max_tokens": 900, **tools}
            answer = (await client.chat.completions.create(**options)).choices[0]
            assert (answer.message.content, answer.finish_reason) == (says, "stop")
            assert answer.message.tool_calls is None
            text = ""
            async for chunk in await client.chat.completions.create(**options, stream=True):
                text += "".join(part.delta.content or "" for part in chunk.choices)
            assert text == says


async def test_the_template_shows_tools_calls_and_results(tmp_path):
    async with grammar_service(tmp_path, says="ok") as service, service.openai() as client:
        prompts: list[str] = []
        generate = service.engine.generate

        async def kept(request: Any) -> Any:
            prompts.append(service.tokenizer.decode(request.prompt_token_ids, False))
            return await generate(request)

        service.engine.generate = kept  # type: ignore[method-assign]
        call = {"name": "weather", "arguments": '{"city": "Bern"}'}
        await client.chat.completions.create(
            model="base", tools=[CLOCK, WEATHER],  # type: ignore[list-item]
            messages=[
                *MESSAGES,
                {"role": "assistant", "content": None,
                 "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},  # type: ignore[typeddict-item]
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ],
        )  # fmt: skip
        assert '"description": "Tell the weather"' in prompts[0] and "strict" not in prompts[0]
        assert prompts[0].index('"clock"') < prompts[0].index('"weather"')
        assert '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}' in prompts[0]
        assert "<|im_start|>tool\nrain<|im_end|>" in prompts[0]
        await client.chat.completions.create(
            model="base", messages=MESSAGES, tools=TOOLS, tool_choice="none"
        )
        assert "weather" not in prompts[1]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHATML, {"tools": TOOLS}, "tools", "tools_not_supported"),
    (CHATML, {"tools": TOOLS, "tool_choice": "required"}, "tools", "tools_not_supported"),
    (HERMES.replace("tool_call>", "call>"), {"tools": TOOLS}, "tool_choice",
     "tool_choice_not_supported"),
    (HERMES, {"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format",
     "conflicting_fields"),
    (HERMES, {"tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}],
        "tool_choice": "required"}, "tools[0].function.parameters.properties.a.uniqueItems",
     "unsupported_schema_keyword"),
    (HERMES, {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function",
        "function": {"name": "f", "arguments": "[1]"}}]}]},
     "messages[0].tool_calls[0].function.arguments", "invalid_value"),
    (HERMES, {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function",
        "function": {"name": "f", "arguments": '{"a":' + "[" * 700 + "]" * 700 + "}"}}]}]},
     "messages[0].tool_calls[0].function.arguments", "json_too_deep"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
async def test_what_cannot_be_done_with_tools_is_refused_by_name(tmp_path, number):
    template, fields, param, code = REFUSED[number]
    async with (
        grammar_service(tmp_path, says="ok", chat_template=template) as service,
        service.openai() as client,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                **{"model": "base", "messages": MESSAGES, **fields}
            )
        assert (refused.value.param, refused.value.code) == (param, code)
