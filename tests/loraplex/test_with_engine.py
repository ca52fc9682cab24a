"""The service on the engine's own core: scheduler, adapter host and fetches are real."""

import asyncio
import json
import threading
from collections.abc import Sequence

import httpx
import openai
import pytest

from engine.scheduled_batch import ScheduledBatch
from tests.support.scripted_engine import ScriptedRunner
from tests.support.service_on_engine import service_on_engine
from tests.support.waiting import SECONDS, until_idle

pytestmark = pytest.mark.anyio

NUM_WORDS = 20


async def test_an_upload_is_served_at_once_by_one_fetch(tmp_path):
    def reply(prompt: Sequence[int], adapter: str | None) -> Sequence[int]:
        return [7] * (3 if adapter is None else 5)

    async with service_on_engine(tmp_path, ScriptedRunner(reply)) as (service, engine, fetched):
        uploaded = await service.upload("legal")
        async with service.openai() as client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="legal", messages=[{"role": "user", "content": f"number {i}"}]
                    )
                    for i in range(12)
                ),
                client.chat.completions.create(
                    model="base", messages=[{"role": "user", "content": "x"}]
                ),
            )
        tokens = [r.usage.completion_tokens for r in replies if r.usage]
        assert tokens == [6] * 12 + [4]
        assert fetched == [uploaded["digest"]]
        await until_idle(engine)
        rows = await service.usage(num_rows=13)
        assert sum(row.load_seconds for row in rows) > 0
        assert all(row.load_seconds <= row.queue_seconds for row in rows)


async def test_the_second_time_a_prompt_comes_it_is_cached_for_its_tenant_only(tmp_path):
    async with service_on_engine(tmp_path, ScriptedRunner()) as (service, _, _):
        prompt = list(range(5, 53))  # three full blocks

        async def cached(key: str, salt: str | None = None) -> int:
            async with service.openai(key) as client:
                reply = await client.completions.create(
                    model="base", prompt=prompt, max_tokens=1,
                    extra_body={"cache_salt": salt} if salt else {},
                )  # fmt: skip
            assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
            return reply.usage.prompt_tokens_details.cached_tokens or 0

        assert await cached("acme:inference") == 0
        assert await cached("acme:inference") == 32
        assert await cached("zen:inference") == 0
        assert await cached("acme:inference", salt="mine") == 0
        assert await cached("acme:inference", salt="mine") == 32
        assert await cached("zen:inference", salt="mine") == 0
        assert await cached("zen:inference") == 32


async def test_a_stream_that_is_cut_anywhere_says_what_the_whole_reply_says(tmp_path):
    runner = ScriptedRunner()
    async with service_on_engine(tmp_path, runner) as (service, _, _):
        said = service.tokenizer.encode("a 👨\u200d👩\u200d👧 e\u0301 🇩🇪 안녕 مرحبا", False)
        runner.reply = lambda prompt, adapter: said
        hello = [{"role": "user", "content": "Hello"}]
        async with service.openai() as client:
            for count in range(1, len(said) + 1):
                asked = {"model": "base", "messages": hello, "max_tokens": count}
                reply = await client.chat.completions.create(**asked)
                whole = reply.choices[0].message.content or ""
                stream = await client.chat.completions.create(**asked, stream=True)
                parts = [c.delta.content or "" async for chunk in stream for c in chunk.choices]
                assert "".join(parts) == whole == service.tokenizer.decode(said[:count])
                # Half a character shows only where the text ends in one.
                assert "\ufffd" not in whole.rstrip("\ufffd")
                assert "\ufffd" not in "".join(list(filter(None, parts))[:-1])


async def test_a_stop_string_ends_the_engines_work(tmp_path):
    is_cut = threading.Event()

    def hold(batch: ScheduledBatch) -> None:
        """What is drawn until then is more than the string needs."""
        assert runner.num_steps < 50 or is_cut.wait(SECONDS)

    runner = ScriptedRunner(before_step=hold)
    async with service_on_engine(tmp_path, runner, threaded=True) as (service, engine, _):
        said = service.tokenizer.encode("numbers 0 1 2 3 4 5 6", False)
        runner.reply = lambda prompt, adapter: said * 50
        async with service.openai() as client:
            reply = await client.completions.create(
                model="base", prompt="x", stop=" 3 ", max_tokens=400
            )
        assert reply.choices[0].text == "numbers 0 1 2"
        is_cut.set()
        await until_idle(engine)
        assert (await engine.stats()).output_tokens < 100


async def test_an_answer_cut_at_a_stop_string_says_how_long_it_waited(tmp_path):
    pause = threading.Event()
    runner = ScriptedRunner(before_step=lambda batch: pause.wait(0.001) and None)
    async with service_on_engine(tmp_path, runner, threaded=True) as (service, engine, _):
        said = service.tokenizer.encode("numbers 0 1 2 3 4 5 6", False)
        runner.reply = lambda prompt, adapter: said * 50
        await service.upload("legal")
        body = {"model": "legal", "prompt": "x", "stop": " 3 ", "max_tokens": 400}
        async with service.client() as client:
            reply = await client.post("/v1/completions", json=body)
            async with client.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as stream:
                lines = [line async for line in stream.aiter_lines() if line.startswith("data: {")]
        assert reply.json()["choices"][0]["finish_reason"] == "stop"
        milliseconds = {
            part: float(reply.headers[f"x-loraplex-{part}-ms"])
            for part in ("queue", "load", "prefill", "decode")
        }
        assert all(value > 0 for value in milliseconds.values()), milliseconds
        assert milliseconds["queue"] >= milliseconds["load"]
        assert json.loads(lines[-1].removeprefix("data: "))["loraplex"]["prefill_ms"] > 0
        rows = await service.usage(num_rows=2)
        assert all(row.queue_seconds > 0 for row in rows)
        assert sum(row.load_seconds for row in rows) > 0  # the first one's
        await until_idle(engine)


async def test_replacing_an_adapter_under_load_gives_whole_answers_of_one_version(tmp_path):
    runner = ScriptedRunner()
    async with service_on_engine(tmp_path, runner) as (service, engine, _):
        words = [service.tokenizer.encode(word, False) for word in (" one", " two", " three")]
        known: dict[str, list[int]] = {}

        def reply(prompt: Sequence[int], adapter: str | None) -> Sequence[int]:
            return known[adapter or ""] * NUM_WORDS

        runner.reply = reply
        for seed, word in enumerate(words):
            uploaded = await service.upload("legal", seed=seed)
            known[uploaded["digest"]] = word
        expected = {service.tokenizer.decode(word) * NUM_WORDS for word in words}

        async def ask(client: openai.AsyncOpenAI) -> str:
            try:
                stream = await client.chat.completions.create(
                    model="legal", messages=[{"role": "user", "content": "x"}], stream=True
                )
                return "".join(
                    [c.choices[0].delta.content or "" async for c in stream if c.choices]
                )
            except openai.APIStatusError as error:
                assert error.code in {"model_not_found", "adapter_unavailable"}
                return ""
            except openai.APIError as error:
                assert error.code == "adapter_unavailable"
                return ""

        async with service.openai() as client, service.client("acme:tenant") as manager:
            answers: list[str] = []
            for turn in range(10):
                asked = [asyncio.create_task(ask(client)) for _ in range(10)]
                await asyncio.sleep(0)
                await manager.delete("/v1/adapters/legal")
                await service.upload("legal", seed=turn % 3)
                answers += await asyncio.gather(*asked)
        whole = [answer for answer in answers if answer]
        assert set(whole) <= expected
        assert whole
        await until_idle(engine)


async def test_a_damaged_adapter_fails_alone_and_a_new_upload_mends_it(tmp_path):
    async with service_on_engine(tmp_path, ScriptedRunner()) as (service, _, _):
        await service.upload("good", seed=1)
        digest = (await service.upload("bad", seed=2))["digest"]
        (stored,) = (tmp_path / "blobs").rglob(f"{digest}/*.safetensors")
        stored.write_bytes(b"damaged")

        async def status(client: httpx.AsyncClient, model: str) -> int:
            body = {"model": model, "prompt": "x", "max_tokens": 2}
            return (await client.post("/v1/completions", json=body)).status_code

        async with service.client() as client:
            for _ in range(2):
                assert await status(client, "bad") == 503
                assert await status(client, "good") == 200
                assert (await client.get("/health/ready")).status_code == 200
            await service.upload("bad", seed=2)
            assert await status(client, "bad") == 200
