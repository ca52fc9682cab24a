"""The CPU's engine with the GPU's ways of running steps: the same answers, switched on or off."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.engine_args import EngineArgs, parse_engine_args
from engine.errors import ConfigError
from engine.messages import EngineRequest
from engine.process import build_parts
from engine.sampling_params import SamplingParams
from engine.transport.inline_client import InlineEngineClient
from tests.support.model_lab import digest_of, prompt_of
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

pytestmark = pytest.mark.anyio

ADAPTERS: dict[str, dict[str, Any]] = {
    "qv": {"r": 4},
    "all": {"r": 8, "target_modules": "all-linear"},
    "dora": {"r": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    folder = tmp_path_factory.mktemp("switches")
    model_dir = make_tiny_model(folder / "base", "llama")
    cache, digests = folder / "cache", list[str]()
    cache.mkdir(mode=0o700)
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        made = make_tiny_adapter(folder / name, model_dir, seed=seed, **config)
        digests.append(digest_of(made))
        made.rename(cache / digests[-1])
    return model_dir, cache, digests


def args_of(lab: tuple[Path, Path, list[str]], **switches: Any) -> EngineArgs:
    model_dir, cache, _ = lab
    return EngineArgs(
        model_dir=str(model_dir),
        socket_path="/unused",
        cache_dir=str(cache),
        generation=1,
        dtype="float32",
        num_kv_blocks=9,  # few enough that sequences are preempted however slowly adapters are read
        max_num_seqs=6,
        max_num_batched_tokens=40,
        max_loras=2,
        num_threads=1,
        **switches,
    )


def requests_of(digests: list[str]) -> list[EngineRequest]:
    made: list[EngineRequest] = []
    for number in range(14):
        params = SamplingParams(
            max_tokens=20 + 5 * (number % 4),
            seed=number,
            temperature=[0.0, 1.0, 0.8][number % 3],
            top_p=0.9 if number % 5 == 0 else 1.0,
            n=2 if number == 6 else 1,
            presence_penalty=0.5 if number == 7 else 0.0,
            logprobs=2 if number % 4 == 1 else None,
            stop_token_ids=(number * 5, number * 9),
        )
        made.append(
            EngineRequest(
                request_id=number + 1,
                tenant=f"t{number % 3}",
                adapter=[None, *digests][number % 4],
                prompt_token_ids=prompt_of(3 + 4 * number, number),
                sampling=params,
            )
        )
    return made


Answer = list[tuple[int, list[int], Any, str | None]]


async def answers(lab: tuple[Path, Path, list[str]], **switches: Any) -> tuple[list[Answer], Any]:
    parts = build_parts(args_of(lab, **switches))
    try:
        async with InlineEngineClient(parts) as client:

            async def ask(request: EngineRequest) -> Answer:
                stream = await client.generate(request)
                return [
                    (delta.index, delta.token_ids, delta.logprobs, delta.finish_reason)
                    async for output in stream
                    for delta in output.deltas
                ]

            told = await asyncio.gather(*(ask(request) for request in requests_of(lab[2])))
            return [sorted(answer, key=lambda part: part[0]) for answer in told], (
                await client.stats()
            )
    finally:
        parts.close()


async def test_no_switch_changes_an_answer(lab):
    """Preemptions, swaps, forks, stop ids, penalties, log-probabilities, an adapter with DoRA."""
    plain, stats = await answers(lab)
    assert stats.preemptions > 0 and stats.slots_used == 2
    for switches in (
        {"decode_ladder": True},
        {"async_scheduling": True},
        {"decode_ladder": True, "async_scheduling": True},
    ):
        told, stats = await answers(lab, **switches)
        assert told == plain, switches
        assert stats.running == stats.kv_blocks_used == 0
        assert stats.kv_blocks_total == 9, "padding's block is none of the scheduler's"


def test_the_gpus_ways_are_off_on_a_cpu_and_on_on_a_gpu_unless_they_are_switched(lab):
    cpu, gpu = args_of(lab), args_of(lab, device="cuda")
    assert not cpu.effective_async_scheduling and not cpu.effective_decode_ladder
    assert gpu.effective_async_scheduling and gpu.effective_decode_ladder
    switched = args_of(lab, device="cuda", async_scheduling=False, decode_ladder=False)
    assert not switched.effective_async_scheduling and not switched.effective_decode_ladder


def test_a_share_of_memory_that_is_none_is_refused_by_name(lab):
    document = msgspec.json.encode(args_of(lab)).replace(
        b'"gpu_memory_utilization":0.9', b'"gpu_memory_utilization":1.5'
    )
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        parse_engine_args(document)


def test_keys_in_eight_bits_are_refused_on_a_cpu_and_reach_a_gpu(lab):
    document = msgspec.json.encode(args_of(lab, kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 needs device cuda"):
        parse_engine_args(document)
    on_gpu = args_of(lab, kv_cache_dtype="fp8", device="cuda")
    assert parse_engine_args(msgspec.json.encode(on_gpu)).kv_cache_dtype == "fp8"
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        parse_engine_args(document.replace(b'"kv_cache_dtype":"fp8"', b'"kv_cache_dtype":"fp4"'))
