"""Random requests on a crowded engine: each equals its run alone, bit for bit.

A small KV pool whose unused blocks are poisoned with NaN before every step, fewer slots than
adapters, one adapter whose activations overflow, forks, prefix hits, aborts, unloads.
"""

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.messages import EngineRequest
from engine.runner.adapter_weights import AdapterWeights
from engine.runner.build_runner import BuiltRunner, build_runner
from engine.sampling_params import SamplingParams
from tests.support.memory_engine import FakeClock, FakeSource
from tests.support.model_lab import digest_of
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_adapter, make_tiny_model

ADAPTERS: list[dict[str, Any]] = [
    {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    {"r": 16, "target_modules": "all-linear", "use_rslora": True},
    {"r": 7, "target_modules": ["up_proj", "down_proj", "o_proj"]},
    {"r": 2, "target_modules": ["v_proj", "down_proj"], "strength": 3e37},  # overflows
]
NUM_REQUESTS = 18
MAX_LEN = 90


class Weights(FakeSource):
    """Host memory with real weights; the test says when a load ends."""

    def __init__(self, weights: Mapping[str, AdapterWeights], **options: Any) -> None:
        super().__init__(**options)
        self._weights = weights

    def get(self, digest: str) -> Any:
        return self._weights[digest] if super().get(digest) else None


class PoisonedEngine:
    """An engine that would show any read of a block that nobody has written."""

    def __init__(self, built: BuiltRunner, source: Weights, **config: Any) -> None:
        self.source = source
        self.core = EngineCore(
            SchedulerConfig(max_model_len=MAX_LEN, **config), built.runner, source,
            eos_token_ids=built.eos_token_ids, vocab_size=built.vocab_size, clock=FakeClock(),
        )  # fmt: skip
        self._storage = built.runner._kv_cache._storage
        self._blocks = self.core._scheduler._lifecycle.blocks
        self.over: dict[int, str | None] = {}
        self.answers: dict[int, dict[int, tuple[list[int], list[Any]]]] = {}
        self.endings: dict[tuple[int, int], Any] = {}

    def step(self) -> None:
        unused = [b for b in self._blocks._free if b not in self._blocks._published]
        self._storage.index_fill_(3, torch.tensor(unused, dtype=torch.int64), float("nan"))
        for _, output in self.core.step():
            answer = self.answers.setdefault(output.request_id, {})
            for delta in output.deltas:
                ids, logprobs = answer.setdefault(delta.index, ([], []))
                ids += delta.token_ids
                logprobs += delta.logprobs or []
                if delta.finish_reason:
                    self.endings[output.request_id, delta.index] = (
                        delta.finish_reason,
                        delta.stop_token_id,
                    )
            if output.finished:
                self.over[output.request_id] = output.error_code
        self.core.check_integrity()


def random_request(draw: random.Random, number: int, digests: list[str], n: int) -> EngineRequest:
    prompts = [[(seed + 7 * i + i * i) % VOCAB_SIZE for i in range(70)] for seed in (1, 2)]
    options: list[dict[str, Any]] = [
        {}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.8, "frequency_penalty": -0.4},
        {"logit_bias": {5: 4.0, 9: -100.0}}, {"stop_token_ids": tuple(range(0, 60, 3))},
        {"min_tokens": 4}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.02},
    ]  # fmt: skip
    return EngineRequest(
        request_id=number,
        tenant=draw.choice(["x", "y"]),
        prompt_token_ids=draw.choice(prompts)[: draw.choice([1, 15, 16, 17, 33, 50, 70])],
        adapter=draw.choice([None, *digests]),
        sampling=SamplingParams(
            max_tokens=draw.choice([1, 8, 30]),
            seed=draw.randrange(2**63),
            n=n,
            temperature=draw.choice([0.0, 1.0]),
            ignore_eos=draw.random() < 0.7,
            logprobs=draw.choice([None, 0, 2]),
            **draw.choice(options),
        ),
    )


@pytest.mark.parametrize(("family", "dtype"), [("mistral", "float32"), ("qwen2", "bfloat16")])
def test_every_answer_of_a_crowded_engine_equals_its_run_alone(
    family: str, dtype: str, tmp_path: Path
):
    model = make_tiny_model(tmp_path / "model", family)
    folders = [
        make_tiny_adapter(tmp_path / f"adapter-{seed}", model, seed=seed, **config)
        for seed, config in enumerate(ADAPTERS)
    ]

    def build(num_kv_blocks: int, max_loras: int) -> BuiltRunner:
        return build_runner(
            model, dtype=dtype, num_kv_blocks=num_kv_blocks, max_loras=max_loras, self_test=False
        )

    big = build(48, len(ADAPTERS))
    weights = {digest_of(f): big.load_adapter(digest_of(f), f) for f in folders}
    happened = Counter[str]()
    for seed, (blocks, seats, spare_tokens, slots) in enumerate(
        [(6, 1, 0, 1), (6, 4, 0, 2), (9, 4, 20, 1), (12, 8, 60, 3)]
    ):
        draw = random.Random(seed)
        source = Weights(weights, auto=False, capacity=1)
        engine = PoisonedEngine(
            build(blocks, slots), source, num_kv_blocks=blocks, max_num_seqs=seats,
            max_num_batched_tokens=seats + spare_tokens, max_loras=slots,
        )  # fmt: skip
        requests = [
            random_request(draw, number, list(weights), min(seats, draw.choice([1, 1, 2, 4])))
            for number in range(NUM_REQUESTS)
        ]
        aborted: set[int] = set()
        for number in range(10_000):
            if number % 3 == 0 and number // 3 < NUM_REQUESTS:
                engine.core.add("c", requests[number // 3])
            for digest in list(source.pending):
                if draw.random() < 0.3:
                    source.deliver(digest)
            if number in (20, 40):
                aborted |= {draw.randrange(number // 3)} - engine.over.keys()
                for request_id in aborted:
                    engine.core.abort("c", request_id)
                engine.core.unload(draw.choice(list(weights)))
            engine.step()
            if number > 3 * NUM_REQUESTS and len(engine.over) + len(aborted) == NUM_REQUESTS:
                break
        stats = engine.core.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        happened.update(preemptions=stats.preemptions, cached=stats.cached_tokens)
        happened.update(loads=source.num_loads)

        alone = PoisonedEngine(
            big, Weights(weights), num_kv_blocks=48, max_num_seqs=4, max_num_batched_tokens=512,
            max_loras=len(ADAPTERS), enable_prefix_cache=False,
        )  # fmt: skip
        for request in requests:
            number = request.request_id
            if number in aborted:
                continue
            alone.core.add("c", request)
            while number not in alone.over:
                alone.step()
            assert engine.over[number] == alone.over[number]
            happened["failed" if engine.over[number] else "answered"] += 1
            if engine.over[number] is None:
                assert engine.answers[number] == alone.answers[number], request
                for index in range(request.sampling.n):
                    assert engine.endings[number, index] == alone.endings[number, index]
        for slot in range(len(ADAPTERS)):
            big.runner.clear_slot(slot)
    assert min(happened[event] for event in ("preemptions", "cached", "failed", "answered")) > 0
    assert happened["loads"] > 2 * len(ADAPTERS)
