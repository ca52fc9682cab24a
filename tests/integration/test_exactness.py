"""The whole service against transformers + PEFT, under everything that could change a token.

24 streams at once over HTTP, three adapters of different ranks and modules and the base, prompts
longer than the token budget, a KV pool that forces preemption, two slots for three adapters.
"""

import asyncio
import random
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service
from tests.support.peft_reference import PeftReference, assert_exact
from tests.support.tiny_models import (
    FAMILIES,
    make_tiny_adapter,
    make_tiny_model,
    modules_of,
)

pytestmark = pytest.mark.anyio

ENGINE = [
    "--dtype", "float32", "--max-loras", "2", "--max-num-seqs", "8",
    "--max-num-batched-tokens", "32", "--num-kv-blocks", "24", "--threads", "1",
]  # fmt: skip
ADAPTERS = {
    "qv": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all": {
        "r": 16, "lora_alpha": 16, "use_rslora": True, "rank_pattern": {"down_proj": 3},
        "target_modules": "all-linear",
    },
    "mlp": {"r": 7, "lora_alpha": 7, "target_modules": ["up_proj", "down_proj", "o_proj"]},
}  # fmt: skip
QUICK = ("llama", "phi3", "gemma2")
"""The families that differ most: what they share with the others is the same code."""


def adapters_of(family: str) -> dict[str, dict[str, Any]]:
    """`ADAPTERS`, with the modules that the family has instead of Llama's."""
    return {
        name: config | {"target_modules": modules_of(family, config["target_modules"])}
        for name, config in ADAPTERS.items()
    }


@dataclass(frozen=True)
class Case:
    model: str
    prompt: list[int]
    max_tokens: int


def make_cases() -> list[Case]:
    draw = random.Random(7)
    return [
        Case(
            model=["base", *ADAPTERS][number % 4],
            prompt=[draw.randrange(256) for _ in range(draw.choice([3, 16, 33, 60, 90]))],
            max_tokens=draw.choice([8, 24, 40, 70]),
        )
        for number in range(24)
    ]


def create_tenant(service: DemoService, name: str) -> str:
    with ApiClient(service.url, service.admin_key) as api:
        api.call("POST", "/admin/tenants", json={"name": name})
        scopes = ["tenant", "inference"]
        key: str = api.call("POST", f"/admin/tenants/{name}/keys", json={"scopes": scopes})["key"]
    return key


def engine_stats(service: DemoService) -> dict[str, Any]:
    with ApiClient(service.url, service.admin_key) as api:
        stats: dict[str, Any] = api.call("GET", "/admin/engine")
    return stats


async def stream_ids(client: openai.AsyncOpenAI, case: Case, **options: object) -> list[int]:
    """The ids of one greedy stream, EOS ignored."""
    stream = await client.completions.create(
        model=case.model, prompt=case.prompt, max_tokens=case.max_tokens, stream=True,
        logprobs=0,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
        **{"temperature": 0} | options,
    )  # fmt: skip
    token_ids: list[int] = []
    async for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs and choice.logprobs.tokens:
                names = choice.logprobs.tokens
                token_ids += [int(name.removeprefix("token_id:")) for name in names]
    return token_ids


@dataclass(frozen=True)
class Served:
    """A service on a model, and the key of its one tenant."""

    service: DemoService
    key: str
    model_dir: Path
    adapters: dict[str, Path]

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.service.url}/v1", api_key=self.key)

    def preemptions(self) -> int:
        return engine_stats(self.service)["preemptions"]


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in FAMILIES],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    family: str = request.param
    folder = tmp_path_factory.mktemp(family)
    model_dir = make_tiny_model(folder / "model", family)
    adapters = {
        name: make_tiny_adapter(folder / name, model_dir, seed=seed, **config)
        for seed, (name, config) in enumerate(adapters_of(family).items())
    }
    with demo_service(model_dir, "base", ENGINE) as service:
        key = create_tenant(service, "acme")
        with ApiClient(service.url, key) as api:
            for name, adapter in adapters.items():
                api.push_adapter(name, adapter)
        yield Served(service, key, model_dir, adapters)


async def test_every_stream_of_a_crowded_service_equals_peft(served: Served):
    cases = make_cases()
    preempted = served.preemptions()
    async with served.client() as client:
        replies = await asyncio.gather(*(stream_ids(client, case) for case in cases))
    stats = engine_stats(served.service)
    assert stats["preemptions"] > preempted
    assert len(stats["resident"]) == 2  # three adapters were served: slots were swapped
    assert stats["running"] == stats["waiting"] == stats["kv_blocks_used"] == 0
    for name, folder in {"base": None, **served.adapters}.items():
        reference = PeftReference(served.model_dir, folder)
        for case, token_ids in zip(cases, replies, strict=True):
            if case.model == name:
                assert_exact(token_ids, reference.greedy(case.prompt, case.max_tokens))


@pytest.mark.parametrize("served", ["llama"], indirect=True)
async def test_prompts_around_block_boundaries_repeat_exactly_whatever_is_cached(served: Served):
    draw = random.Random(15)
    async with served.client() as client:
        for length in (1, 15, 16, 17, 32, 33):
            prompt = [draw.randrange(256) for _ in range(length)]
            found: list[tuple[list[float], int]] = []
            for _ in range(3):
                reply = await client.completions.create(
                    model="qv", prompt=prompt, max_tokens=20, temperature=0, logprobs=0,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                said, usage = reply.choices[0].logprobs, reply.usage
                assert said is not None and usage is not None and usage.prompt_tokens_details
                cached = usage.prompt_tokens_details.cached_tokens or 0
                found.append((list(said.token_logprobs or []), cached))
            # What is cached whole computes its last block again.
            assert [cached for _, cached in found] == [0, *[(length - 1) // 16 * 16] * 2]
            assert found[0][0] == found[1][0] == found[2][0]
    assert engine_stats(served.service)["kv_blocks_used"] == 0


@pytest.mark.parametrize("served", ["llama"], indirect=True)
async def test_what_does_not_fit_into_the_pool_is_refused_or_ends_there(served: Served):
    pool = 24 * 16
    async with served.client() as client:
        beside = asyncio.create_task(stream_ids(client, Case("all", [5] * 20, 60)))
        with pytest.raises(openai.BadRequestError, match=f"context is {pool} tokens") as refused:
            await client.completions.create(model="base", prompt=[7] * (pool + 16))
        assert (refused.value.code, refused.value.status_code) == ("context_length_exceeded", 400)
        reply = await client.completions.create(
            model="base", prompt=[7] * (pool - 10), max_tokens=100, extra_body={"ignore_eos": True}
        )
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None and reply.usage.total_tokens == pool
        assert len(await beside) == 60


async def stream_text(
    client: openai.AsyncOpenAI, case: Case, **options: object
) -> tuple[str, str | None]:
    """The text of one stream as its pieces join, and why it ended."""
    stream = await client.completions.create(
        model=case.model, prompt=case.prompt, max_tokens=case.max_tokens, stream=True, **options
    )  # type: ignore[call-overload]
    text, reason = "", None
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
    return text, reason


@pytest.mark.parametrize("served", ["llama"], indirect=True)
async def test_a_text_is_the_same_alone_in_a_crowd_and_after_preemption(served: Served):
    """Greedy and seeded, with penalties and a stop string, three adapters on two slots."""
    cases = [
        Case(["base", *ADAPTERS][number % 4], list(range(number, number + 20)), 60)
        for number in range(10)
    ]
    options: list[dict[str, Any]] = [
        {
            "seed": number,
            "temperature": number % 3 / 2,
            "frequency_penalty": 0.6 if number % 2 else 0.0,
            "extra_body": {"ignore_eos": True, "repetition_penalty": 1.1 if number % 5 else 1.0},
        }
        for number in range(len(cases))
    ]
    preempted = served.preemptions()
    async with served.client() as client:
        whole = [
            await stream_text(client, case, **given)
            for case, given in zip(cases, options, strict=True)
        ]
        # A stop string that each text has, in half of the calls.
        for (text, _), given in list(zip(whole, options, strict=True))[::2]:
            given["stop"] = [text[40:43], "never said"]
        alone = [
            await stream_text(client, case, **given)
            for case, given in zip(cases, options, strict=True)
        ]
        assert served.preemptions() == preempted
        pairs = zip(cases, options, strict=True)
        crowd = await asyncio.gather(*(stream_text(client, c, **given) for c, given in pairs))
    stats = engine_stats(served.service)
    assert stats["preemptions"] > preempted
    assert stats["running"] == stats["waiting"] == stats["kv_blocks_used"] == 0
    assert crowd == alone
    assert {reason for _, reason in alone} == {"stop", "length"}
    for (text, _), (cut, _) in zip(whole, alone, strict=True):
        assert text.startswith(cut)
    assert len({text for text, _ in alone}) == len(cases)
