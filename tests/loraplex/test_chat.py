"""Chat through the official client, which checks replies against its own strict models."""

import openai
import pytest

from engine.errors import RequestRefused
from engine.messages import EngineRequest
from tests.support.fake_engine import EOS, FakeEngine, info
from tests.support.service import TestService, running_service

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello world"}]


def saying(service: TestService, text: str) -> None:
    """Let the engine answer every request with a text."""
    service.engine.script = lambda request: service.tokenizer.encode(text, False)


async def test_a_whole_reply(tmp_path):
    async with running_service(tmp_path) as service, service.openai() as client:
        saying(service, "Hello there!")
        raw = await client.chat.completions.with_raw_response.create(
            model="base", messages=HELLO, temperature=0
        )
        reply = raw.parse()
        assert reply.choices[0].message.content == "Hello there!"
        assert reply.choices[0].finish_reason == "stop"
        assert (reply.object, reply.model) == ("chat.completion", "base")
        request = service.engine.requests[1]
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(request.prompt_token_ids)
        assert reply.usage.completion_tokens == len(service.tokenizer.encode("Hello there!")) + 1
        assert raw.headers["x-loraplex-adapter"] == "base"
        assert float(raw.headers["x-loraplex-queue-ms"]) == pytest.approx(10)
        assert float(raw.headers["x-loraplex-load-ms"]) == pytest.approx(6)
        assert float(raw.headers["x-loraplex-prefill-ms"]) == pytest.approx(20)
        assert float(raw.headers["x-loraplex-decode-ms"]) == pytest.approx(30)


async def test_the_prompt_is_the_models_template(tmp_path):
    async with running_service(tmp_path) as service, service.openai() as client:
        saying(service, "ok")
        service.engine.info = info(max_model_len=256)
        await client.chat.completions.create(
            model="base",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [
                    {"type": "text", "text": "one"}, {"type": "text", "text": "two"},
                ]},
                {"role": "assistant", "content": None},
                {"role": "user", "content": "go on", "name": "ann"},
            ],
        )  # fmt: skip
        prompt = service.tokenizer.decode(
            service.engine.requests[1].prompt_token_ids, skip_special_tokens=False
        )
        assert prompt == (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
            "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_says_what_the_whole_reply_says(tmp_path, include_usage):
    async with running_service(tmp_path) as service, service.openai() as client:
        saying(service, "naïve café, über 😀 señor")
        whole = await client.chat.completions.create(model="base", messages=HELLO, n=2)
        options = {"stream_options": {"include_usage": True}} if include_usage else {}
        stream = await client.chat.completions.create(
            model="base", messages=HELLO, n=2, stream=True, **options
        )
        chunks = [chunk async for chunk in stream]
        deltas = [choice for chunk in chunks for choice in chunk.choices]
        assert [d.delta.role for d in deltas if d.delta.role] == ["assistant"] * 2
        assert deltas[0].delta.role == "assistant"
        for index in range(2):
            own = [d for d in deltas if d.index == index]
            text = "".join(d.delta.content or "" for d in own)
            assert text == whole.choices[index].message.content == "naïve café, über 😀 señor"
            assert [d.finish_reason for d in own if d.finish_reason] == ["stop"]
            assert own[-1].finish_reason == "stop"
        timed = [c for c in chunks if "loraplex" in (c.model_extra or {})]
        assert timed == chunks[-1:]
        timing = chunks[-1].model_extra["loraplex"]
        assert timing["adapter"] == "base"
        assert timing["queue"] == {"turn": 4.0, "load": 6.0}
        assert (timing["queue_ms"], timing["load_ms"]) == (10.0, 6.0)
        assert (timing["prefill_ms"], timing["decode_ms"]) == (20.0, 30.0)
        assert len({c.id for c in chunks}) == 1
        if include_usage:
            assert chunks[-1].choices == []
            assert chunks[-1].usage == whole.usage
        assert all(c.usage is None for c in chunks[: -1 if include_usage else None])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_text_and_the_count_of_every_choice(tmp_path, stream):
    async with running_service(tmp_path) as service, service.openai() as client:
        tokens = service.tokenizer.encode("numbers 0 1 2 3 stop 4 5 6", False)
        service.engine.script = lambda request: tokens * 3
        kwargs = {
            "model": "base", "messages": HELLO, "n": 2, "max_tokens": 60,
            "stop": [" stop", "never"],
        }  # fmt: skip
        if stream:
            events = await client.chat.completions.create(
                **kwargs, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in events]
            said = [choice for c in chunks for choice in c.choices]
            texts = [
                "".join(choice.delta.content or "" for choice in said if choice.index == index)
                for index in range(2)
            ]
            reasons = [choice.finish_reason for choice in said if choice.finish_reason]
            assert chunks[-1].choices == []
            usage = chunks[-1].usage
        else:
            reply = await client.chat.completions.create(**kwargs)
            texts, usage = [choice.message.content for choice in reply.choices], reply.usage
            reasons = [choice.finish_reason for choice in reply.choices]
        assert texts == ["numbers 0 1 2 3"] * 2
        assert reasons == ["stop"] * 2
        assert usage is not None and usage.completion_tokens % 2 == 0
        counted = tokens[: usage.completion_tokens // 2]
        assert service.tokenizer.decode(counted).endswith("stop")
        assert not service.tokenizer.decode(counted[:-1]).endswith("stop")
        (row,) = await service.usage()
        assert row.output_tokens == usage.completion_tokens
        assert row.finish_reason == "stop"
        assert service.engine.open_requests == []


async def test_the_end_of_the_text_may_be_shown(tmp_path):
    async with running_service(tmp_path) as service, service.openai() as client:
        saying(service, "one two three")
        reply = await client.chat.completions.create(
            model="base",
            messages=HELLO,
            stop=" two",
            extra_body={"include_stop_str_in_output": True},
        )
        assert reply.choices[0].message.content == "one two"
        reply = await client.chat.completions.create(
            model="base", messages=HELLO,
            extra_body={"skip_special_tokens": False, "include_stop_str_in_output": True},
        )  # fmt: skip
        assert reply.choices[0].message.content == "one two three<|im_end|>"


async def test_log_probabilities_cover_the_text_and_not_its_end(tmp_path):
    async with running_service(tmp_path) as service, service.openai() as client:
        saying(service, "Hello é")
        whole = await client.chat.completions.create(
            model="base", messages=HELLO, logprobs=True, top_logprobs=2
        )
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        said = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
        assert said.decode() == "Hello é"
        assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
        stream = await client.chat.completions.create(
            model="base", messages=HELLO, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [
            token
            async for chunk in stream
            for choice in chunk.choices
            for token in (choice.logprobs.content or [] if choice.logprobs else [])
        ]
        assert streamed == logprobs.content


async def test_parameters_reach_the_engine(tmp_path):
    async with running_service(tmp_path) as service, service.openai() as client:
        saying(service, "ok")
        await client.chat.completions.create(
            model="base", messages=HELLO, max_completion_tokens=7, max_tokens=3, temperature=0.5,
            top_p=0.9, seed=-5, presence_penalty=0.1, frequency_penalty=-0.2,
            logit_bias={"5": -100, "6": 3}, n=2,
            extra_body={
                "top_k": 10, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 1,
                "ignore_eos": True, "stop_token_ids": [9], "cache_salt": "mine",
            },
        )  # fmt: skip
        request = service.engine.requests[1]
        params = request.sampling
        assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.9)
        assert params.seed == -5 & (2**63 - 1)
        assert (params.presence_penalty, params.frequency_penalty) == (0.1, -0.2)
        assert params.logit_bias == {5: -100, 6: 3}
        assert (params.n, params.top_k, params.min_p, params.repetition_penalty) == (
            2,
            10,
            0.1,
            1.2,
        )
        assert (params.min_tokens, params.ignore_eos, params.stop_token_ids) == (1, True, (9,))
        assert (request.tenant, request.cache_salt, request.adapter) == ("acme", "mine", None)


async def test_defaults_and_nulls_are_the_same(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        saying(service, "ok")
        body = {"model": "base", "messages": HELLO, "seed": 1}
        nulls = dict.fromkeys(
            ["stream", "stream_options", "n", "temperature", "top_p", "presence_penalty",
             "frequency_penalty", "logit_bias", "stop", "top_k", "min_p", "repetition_penalty",
             "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
             "skip_special_tokens", "cache_salt", "max_tokens", "max_completion_tokens", "logprobs",
             "top_logprobs", "tools", "tool_choice", "response_format", "audio", "modalities",
             "functions", "function_call", "prediction", "reasoning_effort", "verbosity", "user",
             "store", "metadata", "service_tier", "parallel_tool_calls", "web_search_options"]
        )  # fmt: skip
        for extra in ({}, nulls):
            reply = await client.post("/v1/chat/completions", json={**body, **extra})
            assert reply.status_code == 200, reply.text
        first, second = service.engine.requests.values()
        assert first.sampling == second.sampling
        assert first.sampling.max_tokens == 64 - len(first.prompt_token_ids)


async def test_fields_that_change_nothing_are_accepted(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        saying(service, "ok")
        for extra in [
            {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
            {"parallel_tool_calls": False, "prompt_cache_key": "k", "safety_identifier": "s"},
            {"prompt_cache_retention": "24h", "some_field_of_next_year": {"deep": [1]}},
            {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
            {"modalities": ["text"], "verbosity": "medium", "functions": []},
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
            {"echo": False, "use_beam_search": False, "best_of": 1, "bad_words": []},
        ]:
            reply = await client.post(
                "/v1/chat/completions", json={"model": "base", "messages": HELLO, **extra}
            )
            assert reply.status_code == 200, (extra, reply.text)


async def test_the_engines_refusal_comes_before_any_stream(tmp_path):
    engine = FakeEngine()
    async with running_service(tmp_path, engine) as service, service.openai() as client:
        engine.refusal = RequestRefused("queue_full", "4096 requests wait already")
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="base", messages=HELLO, stream=True)
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        engine.refusal = None
        engine.is_ready = False
        with pytest.raises(openai.InternalServerError) as unavailable:
            await client.chat.completions.create(model="base", messages=HELLO, stream=True)
        assert unavailable.value.status_code == 503
        assert unavailable.value.code == "engine_unavailable"


@pytest.mark.parametrize(("length", "room"), [(-1, 1), (0, 0), (1, 0)])
async def test_prompts_at_the_edge_of_the_context(tmp_path, length, room):
    async with running_service(tmp_path) as service, service.openai() as client:
        service.engine.script = lambda request: [7] * 100
        prompt = [5] * (service.engine.info.max_model_len + length)
        if room:
            reply = await client.completions.create(model="base", prompt=prompt, max_tokens=10**12)
            assert reply.choices[0].finish_reason == "length"
            assert reply.usage is not None and reply.usage.completion_tokens == room
        else:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="base", prompt=prompt)
            assert caught.value.code == "context_length_exceeded"
            assert "64" in caught.value.message


async def test_eos_at_the_last_token_is_a_stop(tmp_path):
    async with running_service(tmp_path) as service, service.openai() as client:

        def three_then_eos(request: EngineRequest) -> list[int]:
            return [7, 7, 7, EOS]

        service.engine.script = three_then_eos
        for limit, reason in [(3, "length"), (4, "stop"), (5, "stop")]:
            reply = await client.chat.completions.create(
                model="base", messages=HELLO, max_tokens=limit
            )
            assert reply.choices[0].finish_reason == reason
