"""Completions through the official client: every form of prompt, and what is counted."""

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.service import running_service

pytestmark = pytest.mark.anyio


async def test_every_form_of_prompt(tmp_path):
    async with running_service(tmp_path) as service, service.openai() as client:
        service.engine.script = lambda request: request.prompt_token_ids[:1]
        encode = service.tokenizer.encode
        for prompt, sent in [
            ("one two", [encode("one two")]),
            (["one", "two three"], [encode("one"), encode("two three")]),
            ([5, 6, 7], [[5, 6, 7]]),
            ([[5], [6, 7]], [[5], [6, 7]]),
        ]:
            service.engine.requests.clear()
            reply = await client.completions.create(model="base", prompt=prompt, n=2)
            assert [r.prompt_token_ids for r in service.engine.requests.values()] == sent
            assert [choice.index for choice in reply.choices] == list(range(2 * len(sent)))
            for choice in reply.choices:
                first = sent[choice.index // 2][0]
                assert choice.text == service.tokenizer.decode([first])
                assert choice.finish_reason == "stop"
            assert reply.usage is not None
            assert reply.usage.prompt_tokens == sum(map(len, sent))
            assert reply.usage.completion_tokens == 2 * 2 * len(sent)


async def test_max_tokens_is_sixteen_unless_given_and_null_means_all(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.script = lambda request: [7] * 100
        for extra, expected in [({}, 16), ({"max_tokens": None}, 61), ({"max_tokens": 10**9}, 61)]:
            body = {"model": "base", "prompt": [5, 6, 7], **extra}
            reply = await client.post("/v1/completions", json=body)
            assert reply.json()["usage"]["completion_tokens"] == expected


async def test_stop_token_ids_end_the_text_before_them(tmp_path):
    async with running_service(tmp_path) as service, service.openai() as client:
        dog, fox = (service.tokenizer.encode(word, False)[0] for word in (" dog", " fox"))
        service.engine.script = lambda request: [dog, fox, dog]
        extra = {"stop_token_ids": [fox]}
        reply = await client.completions.create(model="base", prompt="a", extra_body=extra)
        assert reply.choices[0].text == service.tokenizer.decode([dog])
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage is not None and reply.usage.completion_tokens == 2


async def test_log_probabilities_lie_side_by_side(tmp_path):
    async with running_service(tmp_path) as service, service.openai() as client:
        tokens = service.tokenizer.encode("the quick brown", False)
        service.engine.script = lambda request: tokens
        whole = await client.completions.create(model="base", prompt="a", logprobs=2)
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None
        assert "".join(logprobs.tokens) == whole.choices[0].text == "the quick brown"
        assert logprobs.token_logprobs == [-0.5] * len(tokens)
        assert logprobs.top_logprobs is not None and logprobs.text_offset is not None
        for token, top, offset in zip(
            logprobs.tokens, logprobs.top_logprobs, logprobs.text_offset, strict=True
        ):
            assert top[token] == -0.5
            assert whole.choices[0].text[offset:].startswith(token)
        stream = await client.completions.create(model="base", prompt="a", logprobs=2, stream=True)
        found = [choice.logprobs async for chunk in stream for choice in chunk.choices]
        assert [t for part in found if part for t in part.tokens or []] == logprobs.tokens
        assert [t for part in found if part for t in part.text_offset or []] == logprobs.text_offset
        assert [t for part in found if part for t in part.top_logprobs or []] == (
            logprobs.top_logprobs
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_of_the_reply_and_of_the_record_agree(tmp_path, stream):
    class Caching(FakeEngine):
        def say(self, request_id, tokens, **kwargs):
            super().say(request_id, tokens, **{**kwargs, "cached": 2})

    async with running_service(tmp_path, Caching()) as service, service.openai() as client:
        await service.upload("legal")
        service.engine.script = lambda request: [7, 8, 9]
        kwargs = {"model": "legal", "prompt": [[5, 6, 7], [5, 6, 7, 8]], "n": 2}
        if stream:
            chunks = [
                chunk
                async for chunk in await client.completions.create(
                    **kwargs, stream=True, stream_options={"include_usage": True}
                )
            ]
            assert chunks[-1].choices == []
            assert (chunks[-1].model_extra or {})["loraplex"]["adapter"] == "legal@1"
            reasons = [c.finish_reason for chunk in chunks for c in chunk.choices]
            assert [r for r in reasons if r] == ["stop"] * 4
            usage, call_id = chunks[-1].usage, chunks[0].id
        else:
            reply = await client.completions.create(**kwargs)
            usage, call_id = reply.usage, reply.id
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (7, 16)
        assert usage.total_tokens == 23
        assert usage.prompt_tokens_details.cached_tokens == 4
        (row,) = await service.usage()
        assert row.request_id == call_id
        assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (7, 4, 16)
        assert (row.adapter, row.version, row.finish_reason) == ("legal", 1, "stop")
        assert row.queue_seconds == pytest.approx(0.01)
        assert row.load_seconds == pytest.approx(0.006)


async def test_a_request_in_the_path_of_a_tenant_is_the_same(tmp_path):
    async with running_service(tmp_path) as service:
        await service.upload("legal")
        service.engine.script = lambda request: [7]
        for key, path in [
            ("acme:inference", "/v1"), ("acme:inference", "/t/acme/v1"), ("admin", "/t/acme/v1"),
        ]:  # fmt: skip
            async with service.openai(key, path) as client:
                assert "legal" in [model.id async for model in client.models.list()]
                assert (await client.models.retrieve("legal")).owned_by == "acme"
                assert (await client.models.retrieve("org/Tiny-Chat")).id == "org/Tiny-Chat"
                reply = await client.completions.create(model="legal", prompt="a")
                assert reply.model == "legal"
        assert {r.tenant for r in service.engine.requests.values()} == {"acme"}
        assert len({r.adapter for r in service.engine.requests.values()}) == 1
