"""Bad input: a 4xx that names the field, before any work, and nobody else disturbed."""

import asyncio
from typing import Any

import pytest

from loraplex.settings import RequestLimits
from tests.support.service import TestService, running_service
from tests.support.tiny_tokenizers import CHATML

pytestmark = pytest.mark.anyio

CHAT = {"model": "base", "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION = {"model": "base", "prompt": "Hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = "response_format.json_schema.schema"


def schema(value: object) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}
    }


def of_both(*cases: tuple[dict[str, Any], str]) -> list[tuple[str, dict[str, Any], str]]:
    return [
        (path, {**body, **extra}, param)
        for path, body in (("chat/completions", CHAT), ("completions", COMPLETION))
        for extra, param in cases
    ]


BAD = [
    *of_both(
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "1"}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 10**30}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"logit_bias": {"400": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"model": None}, "model"),
        ({"model": 7}, "model"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name",
        ),
        (schema(None), f"{SCHEMA}"),
        (schema([]), f"{SCHEMA}"),
        (schema({"type": "text"}), f"{SCHEMA}"),
        (schema({"enum": ["x" * 2**16]}), f"{SCHEMA}"),
        (schema({"$ref": "http://127.0.0.1:1/x.json"}), f"{SCHEMA}"),
        (schema({"properties": {"not": {"not": {}}}}), f"{SCHEMA}.properties.not.not"),
        (schema({"anyOf": [{}, {"uniqueItems": True}]}), f"{SCHEMA}.anyOf[1].uniqueItems"),
        (schema({"x-guidance": {"lenient": True}, "if": {}}), f"{SCHEMA}.if"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
    ),
    *[
        ("chat/completions", {**CHAT, **extra}, param)
        for extra, param in [
            ({"messages": []}, "messages"),
            ({"messages": "hi"}, "messages"),
            ({"messages": [{"content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
            ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
            (
                {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
                "messages[0].content[0].type",
            ),
            (
                {"messages": [{"role": "assistant", "content": "x", "tool_calls": [TOOL]}]},
                "messages[0].tool_calls[0].function.arguments",
            ),
            (
                {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
                "messages[0].tool_calls",
            ),
            ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
            (
                {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
                "messages[0].function_call",
            ),
            ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
            ({"max_completion_tokens": 0}, "max_completion_tokens"),
            ({"logprobs": 5}, "logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"tools": [TOOL]}, "tools"),
            ({"tools": [TOOL, TOOL], "tool_choice": "none"}, "tools[1].function.name"),
            ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
            (
                {"tools": [{"type": "function", "function": {"name": "a b"}}]},
                "tools[0].function.name",
            ),
            ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
            ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"),
            (
                {"tool_choice": {"type": "function", "function": {"name": "f"}}},
                "tool_choice.function.name",
            ),
            ({"functions": [{"name": "f"}]}, "functions"),
            ({"function_call": {"name": "f"}}, "function_call"),
            ({"audio": {"voice": "x", "format": "mp3"}}, "audio"),
            ({"modalities": ["text", "audio"]}, "modalities"),
            ({"reasoning_effort": "high"}, "reasoning_effort"),
            ({"verbosity": "low"}, "verbosity"),
            ({"web_search_options": {}}, "web_search_options"),
            ({"chat_template": "{{ 1 }}"}, "chat_template"),
            ({"chat_template_kwargs": []}, "chat_template_kwargs"),
            (
                {"add_generation_prompt": True, "continue_final_message": True},
                "add_generation_prompt",
            ),
        ]
    ],
    *[
        ("completions", {**COMPLETION, **extra}, param)
        for extra, param in [
            ({"prompt": ""}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[]]}, "prompt"),
            ({"prompt": ["a", ""]}, "prompt"),
            ({"prompt": None}, "prompt"),
            ({"prompt": 5}, "prompt"),
            ({"prompt": {"a": 1}}, "prompt"),
            ({"prompt": ["a", 5]}, "prompt"),
            ({"prompt": [[1], 5]}, "prompt"),
            ({"prompt": [400]}, "prompt"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": [[1, 10**20]]}, "prompt"),
            ({"prompt": [[1, "x"]]}, "prompt[0][1]"),
            ({"prompt": [True]}, "prompt[0]"),
            ({"prompt": ["a"] * 65}, "prompt"),
            ({"prompt": ["a"] * 60, "n": 3}, "n"),
            ({"logprobs": 21}, "logprobs"),
            ({"logprobs": -1}, "logprobs"),
            ({"logprobs": True}, "logprobs"),
            ({"suffix": "end"}, "suffix"),
            ({"best_of": 3, "n": 2}, "best_of"),
            ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ]
    ],
]  # fmt: skip


async def test_a_bad_field_is_named_and_reaches_nobody(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        wrong: list[Any] = []
        for path, body, param in BAD:
            reply = await client.post(f"/v1/{path}", json=body)
            error = reply.json().get("error", {})
            if (reply.status_code, error.get("param")) != (400, param):
                wrong.append((path, body, param, reply.status_code, error))
            assert set(error) == {"message", "type", "param", "code"}
        assert wrong == []
        assert service.engine.requests == {}


async def test_what_the_engine_would_refuse_has_the_engines_code(tmp_path):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"n": 9}, "n_too_large"),
        ({"stop_token_ids": [400]}, "invalid_token_id"),
        ({"logit_bias": {"400": 1}}, "invalid_token_id"),
        ({"prompt": [5, 400]}, "invalid_token_id"),
    ]
    async with running_service(tmp_path) as service, service.client() as client:
        for extra, code in cases:
            reply = await client.post("/v1/completions", json={**COMPLETION, **extra})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code), extra


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_a_missing_field_is_named(tmp_path, missing):
    async with running_service(tmp_path) as service, service.client() as client:
        body = {name: value for name, value in CHAT.items() if name != missing}
        error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
        assert (error["param"], error["code"]) == (missing, "missing_field")


async def test_numbers_that_json_cannot_hold_are_named(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        for number in ("NaN", "Infinity", "-Infinity", "1e309", "-1e309"):
            for field, value in [
                ("temperature", number), ("top_p", number), ("logit_bias", f'{{"5": {number}}}'),
                ("max_tokens", number),
            ]:  # fmt: skip
                content = f'{{"model": "base", "prompt": "NaN, she said", "{field}": {value}}}'
                reply = await client.post("/v1/completions", content=content)
                error = reply.json()["error"]
                assert reply.status_code == 400
                assert str(error["param"]).startswith(field), (content, error)
        assert service.engine.requests == {}


NO_OBJECTS = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"\xff\xfe", "invalid_json"),
    (b'{"model": "\xff"}', "invalid_json"),
    (b'{"model": "\\ud800", "prompt": "x"}', "invalid_json"),
    (b'{"model": "base"} trailing', "invalid_json"),
    (b"[]", "invalid_value"),
    (b"null", "invalid_value"),
    (b'"text"', "invalid_value"),
    (b"[" * 100_000, "json_too_deep"),
    (b'{"a":' * 100_000, "json_too_deep"),
    (b"[" * 33 + b'"' + b'\\"' * 2_000_000, "json_too_deep"),
    (b'{"a":[' + b"[],{}," * 33 + b'"' + b'\\"' * 2_000_000, "invalid_json"),
    (b'{"model":"base","metadata":' + b"[" * 33 + b"]" * 33 + b"}", "json_too_deep"),
]  # fmt: skip


async def test_what_is_no_json_object_is_refused(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        for content, code in NO_OBJECTS:
            reply = await client.post("/v1/completions", content=content)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code), content[:50]


async def test_brackets_in_a_text_are_not_depth(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.script = lambda request: [7]
        prompt = '[[[{{{"\\\\" \\"[' * 3
        body = {**COMPLETION, "prompt": prompt, "user": "[" * 500 + '"\\' + "{" * 500}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        sent = service.engine.requests[1].prompt_token_ids
        assert service.tokenizer.decode(sent) == prompt


async def test_a_body_over_the_cap_is_413_and_a_slow_one_408(tmp_path):
    limits = RequestLimits(max_body_bytes=1000, body_seconds=1.0)
    async with running_service(tmp_path, requests=limits) as service, service.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            reply = await client.post(path, content=b"x" * 1001)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")

            async def chunks():
                for _ in range(20):
                    yield b"x" * 100

            reply = await client.post(path, content=chunks())
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        assert await _slow_status(service) == 408


async def _slow_status(service: TestService) -> int:
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
        f"authorization: Bearer {service.keys['acme:inference']}\r\n\r\n{{".encode()
    )
    status = int((await reader.readline()).split(b" ")[1])
    writer.close()
    return status


async def test_a_prompt_beyond_all_bounds_is_refused_untokenised(tmp_path, monkeypatch):
    async with running_service(tmp_path) as service, service.client() as client:
        text = "word " * 2000  # 10,000 characters: more than 64 tokens x 64
        for path, body in [
            ("completions", {**COMPLETION, "prompt": text}),
            ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]}),
        ]:
            error = (await client.post(f"/v1/{path}", json=body)).json()["error"]
            assert error["code"] == "context_length_exceeded"


async def test_a_tenants_long_prompts_hold_up_no_others(tmp_path):
    async with running_service(tmp_path, chat_template=CHATML) as service:
        tokenising = service.app.state.services.tokenising
        text = "word " * 600
        long: list[dict[str, Any]] = [
            {"prompt": text},
            {"messages": [{"role": "user", "content": text}]},
            {"messages": [{"role": "user", "content": ""}] * 100},
            {"messages": CHAT["messages"], "chat_template_kwargs": {"x": text}},
        ]
        async with service.client() as ours, service.client("zen:inference") as theirs:
            async with tokenising.of("acme"):
                waiting = [asyncio.create_task(ours.post("/tokenize", json=b)) for b in long]
                for body in long:
                    assert (await theirs.post("/tokenize", json=body)).status_code == 200
                short = await ours.post("/tokenize", json={"prompt": "word"})
                assert short.status_code == 200 and not any(task.done() for task in waiting)
            assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [200] * 4
