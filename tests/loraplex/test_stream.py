"""Streams on the wire: order, silence, failures, and clients that go away."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.errors import RequestRefused
from engine.messages import ChoiceDelta, RequestOutput
from loraplex.settings import StreamSettings
from tests.support.fake_engine import FakeEngine, info
from tests.support.service import running_service
from tests.support.waiting import eventually

pytestmark = pytest.mark.anyio

BODY = {"model": "base", "messages": [{"role": "user", "content": "Hello"}]}


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """Each event of a stream, without its empty line."""
    buffer = ""
    async for text in response.aiter_text():
        buffer += text
        while "\n\n" in buffer:
            event, buffer = buffer.split("\n\n", 1)
            yield event
    assert buffer == ""


def payload(event: str) -> dict[str, Any]:
    assert event.startswith("data: ")
    assert "\n" not in event
    return json.loads(event.removeprefix("data: "))


async def test_the_status_waits_for_the_engine_and_text_comes_as_it_is_made(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        request = client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True})
        async with request as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            assert response.headers["x-loraplex-adapter"] == "base"
            stream = events(response)
            assert payload(await anext(stream))["choices"][0]["delta"]["role"] == "assistant"
            for word in ("Hello", " there"):
                service.engine.say(1, service.tokenizer.encode(word, False))
                text = payload(await anext(stream))["choices"][0]["delta"]["content"]
                assert text == word
            service.engine.say(1, [2], reason="stop", stop_token_id=2, finished=True)
            assert payload(await anext(stream))["choices"][0]["finish_reason"] == "stop"
            assert await anext(stream) == "data: [DONE]"
            assert [event async for event in stream] == []


async def test_what_arrives_together_is_sent_together(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        tokens = service.tokenizer.encode("the quick brown fox", False)
        service.engine.script = lambda request: tokens
        async with client.stream(
            "POST", "/v1/chat/completions", json={**BODY, "stream": True}
        ) as response:
            found = [event async for event in events(response)]
        # Role, all of the text, the end, [DONE].
        assert len(found) == 4
        assert payload(found[1])["choices"][0]["delta"]["content"] == "the quick brown fox"


async def test_a_silent_stream_is_kept_alive(tmp_path):
    streams = StreamSettings(keep_alive_seconds=0.05)
    async with (
        running_service(tmp_path, streams=streams) as service,
        service.client() as client,
        client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response,
    ):
        stream = events(response)
        await anext(stream)
        for _ in range(3):
            assert await anext(stream) == ": keep-alive"
        service.engine.say(1, [2], reason="stop", stop_token_id=2, finished=True)
        rest = [event async for event in stream]
        assert [e for e in rest if e != ": keep-alive"][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("break_it", "code"),
    [
        (lambda engine: engine.break_down(1, "sampling_failed"), "sampling_failed"),
        (lambda engine: engine.break_down(1, "adapter_unavailable"), "adapter_unavailable"),
        (lambda engine: engine.die(), "engine_unavailable"),
        (lambda engine: engine.say(1, [], reason="abort", finished=True), "engine_stopped"),
    ],
)
async def test_a_failure_midway_is_one_error_event_and_no_done(tmp_path, break_it, code):
    async with running_service(tmp_path) as service, service.client() as client:
        async with client.stream(
            "POST", "/v1/chat/completions", json={**BODY, "stream": True}
        ) as response:
            stream = events(response)
            await anext(stream)
            service.engine.say(1, service.tokenizer.encode("Hello there", False))
            await anext(stream)
            break_it(service.engine)
            rest = [payload(event) async for event in stream]
        (error,) = rest
        assert error["error"]["code"] == code
        assert set(error["error"]) == {"message", "type", "param", "code"}
        (row,) = await service.usage()
        assert row.finish_reason == "error"


@pytest.mark.parametrize(
    ("code", "status"), [("sampling_failed", 500), ("adapter_unavailable", 503)]
)
async def test_a_failure_of_a_whole_reply_is_a_status(tmp_path, code, status):
    async with running_service(tmp_path) as service, service.client() as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        await eventually(lambda: bool(service.engine.open_requests))
        service.engine.break_down(1, code)
        reply = await asked
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


async def test_a_stopped_engine_is_to_be_asked_again_when_the_next_one_will_have_started(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        for number, (seconds, told) in enumerate([(0.0, "1"), (6.2, "7")], 1):
            service.engine.info = info(start_seconds=seconds)
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
            await eventually(lambda: bool(service.engine.open_requests))
            service.engine.break_down(number, "engine_stopped")
            reply = await asked
            assert (reply.status_code, reply.headers["retry-after"]) == (503, told)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_away_frees_the_engine_at_once(tmp_path, stream, num_tokens, n):
    async with running_service(tmp_path) as service, service.client() as client:
        body = {**BODY, "stream": stream, "n": n}
        asked = asyncio.create_task(_read_all(client, body))
        await eventually(lambda: bool(service.engine.open_requests))
        for _ in range(num_tokens):
            service.engine.say(1, service.tokenizer.encode(" the", False))
            await asyncio.sleep(0.01)
        asked.cancel()
        await eventually(lambda: service.engine.aborted == [1])
        assert service.engine.open_requests == []
        (row,) = await service.usage()
        assert row.finish_reason == "abort"
        assert row.output_tokens == num_tokens
        assert row.prompt_tokens == len(service.engine.requests[1].prompt_token_ids)


async def _read_all(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass


async def test_a_slow_reader_holds_up_only_itself(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.info = info(max_model_len=200_000)
        word = service.tokenizer.encode(" the", False)
        host, port = service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        text = json.dumps({**BODY, "stream": True, "logprobs": True, "top_logprobs": 20})
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            f"authorization: Bearer {service.keys['acme:inference']}\r\n"
            f"content-length: {len(text)}\r\n\r\n{text}".encode()
        )
        await eventually(lambda: bool(service.engine.open_requests))
        for _ in range(2_000):
            service.engine.say(1, word * 5)
            await asyncio.sleep(0)
        service.engine.script = lambda request: word
        reply = await client.post("/v1/chat/completions", json=BODY)
        assert reply.status_code == 200
        writer.close()
        await eventually(lambda: service.engine.aborted == [1])
        assert reader is not None


async def test_shutting_down_ends_a_stream_and_records_it(tmp_path):
    engine = FakeEngine()
    async with running_service(tmp_path, engine) as service, service.client() as client:
        asked = asyncio.create_task(_read_all(client, {**BODY, "stream": True}))
        await eventually(lambda: bool(engine.open_requests))
        engine.die()
        await asked
        (row,) = await service.usage()
        assert row.finish_reason == "error"


async def test_requests_of_a_list_of_prompts_end_together(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        body = {"model": "base", "prompt": ["one", "two", "three"], "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await eventually(lambda: len(service.engine.open_requests) == 3)
            service.engine.say(2, service.tokenizer.encode("b", False))
            stream = events(response)
            choice = payload(await anext(stream))["choices"][0]
            assert (choice["index"], choice["text"]) == (1, "b")
        await eventually(lambda: sorted(service.engine.aborted) == [1, 2, 3])


async def test_if_one_of_several_prompts_is_refused_none_runs(tmp_path):
    class Picky(FakeEngine):
        async def generate(self, request):
            if request.request_id == 2:
                raise RequestRefused("queue_full", "no room")
            return await super().generate(request)

    async with running_service(tmp_path, Picky()) as service, service.client() as client:
        reply = await client.post(
            "/v1/completions", json={"model": "base", "prompt": ["a", "b", "c"]}
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
        assert service.engine.open_requests == []
        assert sorted(service.engine.aborted) == [1, 3]


async def test_what_came_before_a_failure_is_sent_before_it(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        body = {"model": "base", "prompt": ["one", "two"], "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            service.engine.say(1, service.tokenizer.encode("Hello", False))
            service.engine.break_down(2, "sampling_failed")  # in the same turn of the loop
            found = [payload(event) async for event in events(response)]
        text, error = found
        assert (text["choices"][0]["index"], text["choices"][0]["text"]) == (0, "Hello")
        assert error["error"]["code"] == "sampling_failed"


async def test_text_and_a_failure_in_one_output_are_both_sent(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        body = {"model": "base", "prompt": "one", "n": 2, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            stream = events(response)
            service.engine.say(1, service.tokenizer.encode("Hello", False))
            assert payload(await anext(stream))["choices"][0]["text"] == "Hello"
            deltas = [
                ChoiceDelta(0, service.tokenizer.encode(" there", False)),
                ChoiceDelta(1, [], finish_reason="abort"),
            ]
            service.engine.push(RequestOutput(1, deltas, finished=True))
            text, error = [payload(event) async for event in stream]
        assert text["choices"][0]["text"] == " there"
        assert error["error"]["code"] == "engine_stopped"


async def test_a_reader_that_falls_behind_gets_all_of_it_in_order(tmp_path):
    async with running_service(tmp_path) as service:
        host, port = service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**12)
        body = json.dumps({"model": "base", "prompt": "go", "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
            % (service.keys["acme:inference"].encode(), len(body), body)
        )
        await eventually(lambda: bool(service.engine.open_requests))
        tokens = service.tokenizer.encode("the quick brown fox ", False)
        rounds = 40_000  # more than all buffers hold
        for number in range(rounds):
            service.engine.say(1, tokens)
            if number % 500 == 0:
                await asyncio.sleep(0)
        service.engine.say(1, [2], reason="stop", stop_token_id=2, finished=True)
        raw = await reader.read(-1)
        writer.close()
        texts = [
            json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
            for line in raw.splitlines()
            if line.startswith(b"data: {")
        ]
        assert "".join(texts) == "the quick brown fox " * rounds
        assert len(texts) < rounds  # what waited was merged
        assert b"data: [DONE]" in raw
