"""`response_format`: whatever the model would say, the reply is JSON of the schema."""

import asyncio
import json
from typing import Any

import anyio.to_thread
import openai
import pytest

from loraplex.errors import ApiError
from loraplex.openai.grammar_checks import GrammarChecks
from loraplex.openai.schema_grammar import check_schema, json_schema_grammar
from loraplex.settings import RequestLimits
from tests.support.grammar_service import grammar_service

pytestmark = pytest.mark.anyio

MESSAGES: list[Any] = [{"role": "user", "content": "Sort this ticket."}]
TICKET = {
    "type": "object",
    "properties": {
        "intent": {"enum": ["refund", "invoice", "other"]},
        "urgent": {"type": "boolean"},
        "order": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 99}, {"type": "null"}]},
    },
    "required": ["intent", "urgent", "order"],
    "additionalProperties": False,
}


def of_schema(schema: object, strict: bool = True) -> Any:
    named = {"name": "ticket", "schema": schema, "strict": strict}
    return {"type": "json_schema", "json_schema": named}


def check_ticket(text: str | None) -> str:
    value = json.loads(text or "")
    assert list(value) == ["intent", "urgent", "order"]
    assert value["intent"] in ("refund", "invoice", "other")
    assert isinstance(value["urgent"], bool)
    assert value["order"] is None or 1 <= value["order"] <= 99
    return json.dumps(value)


@pytest.mark.parametrize("strict", [True, False])
async def test_every_choice_is_of_the_schema_streamed_or_whole(tmp_path, strict):
    async with grammar_service(tmp_path) as service, service.openai() as client:
        for seed in range(3):
            options: Any = {
                "model": "base", "messages": MESSAGES, "n": 4, "seed": seed, "max_tokens": 1200,
                "response_format": of_schema(TICKET, strict),
            }  # fmt: skip
            whole = await client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
            texts = [choice.message.content for choice in whole.choices]
            assert len({check_ticket(text) for text in texts}) > 1
            assert {choice.finish_reason for choice in whole.choices} == {"stop"}
            for choice in whole.choices:
                assert choice.logprobs and choice.logprobs.content
                assert "".join(token.token for token in choice.logprobs.content) == (
                    choice.message.content
                )
            streamed = ["", "", "", ""]
            async for chunk in await client.chat.completions.create(**options, stream=True):
                for choice in chunk.choices:
                    streamed[choice.index] += choice.delta.content or ""
            assert streamed == texts


async def test_text_completions_are_held_to_a_schema_too(tmp_path):
    async with grammar_service(tmp_path) as service, service.openai() as client:
        reply = await client.completions.create(
            model="base", prompt=["a", "b"], max_tokens=1200, seed=3,
            extra_body={"response_format": of_schema(TICKET)},
        )  # fmt: skip
        for choice in reply.choices:
            check_ticket(choice.text)


async def test_a_reply_that_max_tokens_cuts_is_the_beginning_of_one(tmp_path):
    async with grammar_service(tmp_path) as service, service.openai() as client:
        options: Any = {"model": "base", "messages": MESSAGES, "seed": 1}
        for response_format in (of_schema(TICKET), {"type": "json_object"}):
            reply = await client.chat.completions.create(
                **options, max_tokens=3, response_format=response_format
            )
            assert reply.choices[0].finish_reason == "length"
            assert (reply.choices[0].message.content or "").startswith("{")
            assert reply.usage and reply.usage.completion_tokens == 3


async def test_a_parsed_reply_is_what_the_official_client_makes_of_it(tmp_path):
    async with grammar_service(tmp_path) as service, service.openai() as client:
        parsed = await client.chat.completions.parse(
            model="base", messages=MESSAGES, max_tokens=1200, seed=5,
            response_format=of_schema(TICKET),
        )  # fmt: skip
        check_ticket(parsed.choices[0].message.content)


async def test_constrained_and_free_requests_run_side_by_side(tmp_path):
    async with grammar_service(tmp_path) as service, service.openai() as client:
        free: Any = {"model": "base", "messages": MESSAGES, "seed": 2, "max_tokens": 40}
        alone = await client.chat.completions.create(**free)
        together = await asyncio.gather(
            client.chat.completions.create(**free),
            *(
                client.chat.completions.create(
                    model="base", messages=MESSAGES, seed=seed, max_tokens=1200,
                    response_format=of_schema({**TICKET, "title": f"number {seed}"}),
                )
                for seed in range(5)
            ),
        )  # fmt: skip
        assert together[0].choices[0].message == alone.choices[0].message
        for reply in together[1:]:
            check_ticket(reply.choices[0].message.content)


async def test_an_engine_that_cannot_follow_grammars_says_so(tmp_path):
    async with grammar_service(tmp_path) as service, service.openai() as client:
        core = service.engine._parts.core  # type: ignore[attr-defined]
        core._prepare_grammar = None
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="base", messages=MESSAGES, response_format={"type": "json_object"}
            )
        assert refused.value.code == "structured_output_unavailable"


async def test_a_schema_that_takes_too_long_is_refused_and_holds_up_nobody(monkeypatch):
    started = asyncio.Event()
    over = asyncio.Event()

    async def slow(*args: object, **options: object) -> str:
        started.set()
        await over.wait()
        return ""

    monkeypatch.setattr(anyio.to_thread, "run_sync", slow)
    checks = GrammarChecks(seconds=0.05)
    with pytest.raises(ApiError) as refused:
        await checks.check("acme", "grammar", {"response_format": {}})
    assert started.is_set()
    assert (refused.value.status, refused.value.code) == (400, "schema_too_complex")
    over.set()
    await checks.check("acme", "grammar", {"response_format": {}})


async def test_a_tenants_slow_schemas_hold_up_no_other_tenants(monkeypatch):
    release = asyncio.Event()
    begun: list[str] = []

    async def slow(_: object, grammar: str, *args: object, **options: object) -> None:
        begun.append(grammar)
        if grammar.startswith("slow"):
            await release.wait()

    monkeypatch.setattr(anyio.to_thread, "run_sync", slow)
    checks = GrammarChecks(seconds=60)
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(checks.check("hog", f"slow {number}", {"x": {}}))
        group.create_task(checks.check("hog", "slow 0", {"x": {}}))
        await asyncio.sleep(0)
        await checks.check("acme", "quick", {"x": {}})
        assert begun == ["slow 0", "quick"]
        release.set()
    assert begun == ["slow 0", "quick", *(f"slow {number}" for number in range(1, 20))]


async def test_a_checked_schema_is_not_checked_again(monkeypatch):
    checks = GrammarChecks()
    grammar = json_schema_grammar(TICKET)
    await checks.check("acme", grammar, {"x": TICKET})

    async def never(*args: object, **options: object) -> str:
        raise AssertionError

    monkeypatch.setattr(anyio.to_thread, "run_sync", never)
    await checks.check("zen", grammar, {"x": TICKET})


def test_schemas_are_bounded_in_bytes_and_depth():
    limits = RequestLimits(max_schema_bytes=1000, max_schema_depth=5)
    deep: dict[str, Any] = {}
    for _ in range(4):
        deep = {"items": deep}
    check_schema(deep, "s", limits)
    for schema, code in [
        ({"items": deep}, "schema_too_deep"), ({"const": "x" * 1000}, "schema_too_large"),
    ]:  # fmt: skip
        with pytest.raises(ApiError) as refused:
            check_schema(schema, "s", limits)
        assert (refused.value.code, refused.value.param) == (code, "s")
