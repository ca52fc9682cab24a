"""A tiny model on a device's runner, and what must hold on any device: bodies of tests.

Triton's interpreter runs them everywhere, `pytest -m gpu` on a CUDA device.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.device.build import build_device_runner
from engine.device.device_runner import DeviceRunner
from engine.device.setup import DeviceSetup
from engine.messages import EngineRequest
from engine.runner.build_runner import BuiltRunner
from engine.sampling_params import SamplingParams
from tests.support.hand_driver import GreedySampler, HandDriver, HandSequence
from tests.support.loaded_adapters import LoadedAdapters
from tests.support.model_lab import digest_of, prompt_of
from tests.support.peft_reference import PeftReference, assert_exact
from tests.support.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_adapter, make_tiny_model

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "qv": {"r": 4, "target_modules": ["q_proj", "v_proj"], "seed": 1},
    "all": {"r": 8, "target_modules": "all-linear", "seed": 2},
    "mlp": {"r": 3, "target_modules": ["up_proj", "down_proj", "o_proj"], "seed": 3},
}
CLOSE = 1e-4
"""Largest difference of float32 logits, relative to the largest."""


@dataclass
class DeviceLab:
    model_dir: Path
    adapters: dict[str, Path]
    setup: DeviceSetup
    built: BuiltRunner
    weights: dict[str, Any]
    """By digest."""

    @property
    def runner(self) -> DeviceRunner:
        assert isinstance(self.built.runner, DeviceRunner)
        return self.built.runner


def make_device_lab(
    folder: Path, setup: DeviceSetup, sampler: GreedySampler | None = None, **settings: Any
) -> DeviceLab:
    """Model and adapters in a folder; with a `sampler` for a `HandDriver`."""
    model_dir = make_tiny_model(folder / "base", "llama", **SMALL)
    adapters = {
        name: make_tiny_adapter(folder / name, model_dir, **config)
        for name, config in ADAPTERS.items()
    }
    options: dict[str, Any] = {
        "dtype": "float32",
        "num_kv_blocks": 8,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 12,
        "max_model_len": 64,
    }
    built = build_device_runner(
        model_dir,
        setup,
        make_sampler=None if sampler is None else lambda vocab_size, eos: sampler,
        **options | settings,
    )
    weights = {
        digest_of(path): built.load_adapter(digest_of(path), path) for path in adapters.values()
    }
    return DeviceLab(model_dir, adapters, setup, built, weights)


def engine_of(lab: DeviceLab, *, overlap: bool) -> EngineCore:
    config = SchedulerConfig(
        num_kv_blocks=lab.built.num_kv_blocks,
        max_num_seqs=3,
        max_num_batched_tokens=12,
        max_model_len=lab.built.max_model_len,
        max_loras=2,
    )
    return EngineCore(
        config,
        lab.runner,
        LoadedAdapters(lab.weights),
        eos_token_ids=[EOS_TOKEN_ID],
        vocab_size=VOCAB_SIZE,
        clock=iter(range(1_000_000)).__next__,
        launch=lab.runner.launch if overlap else None,
    )


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[int, list[int]]:
    for request in requests:
        core.add("client", request)
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    while core.has_work:
        for _, output in core.step():
            assert output.error is None
            for delta in output.deltas:
                tokens[output.request_id] += delta.token_ids
        core.check_integrity()
    return tokens


def assert_all_exact(
    lab: DeviceLab, cases: list[tuple[EngineRequest, Path | None]], tokens: dict[int, list[int]]
) -> None:
    for request, path in cases:
        reference = PeftReference(lab.model_dir, path)
        alone = reference.greedy(request.prompt_token_ids, request.sampling.max_tokens)
        assert_exact(tokens[request.request_id], alone)


def requests_of(lab: DeviceLab, **sampling: Any) -> list[tuple[EngineRequest, Path | None]]:
    cases: list[tuple[str | None, int, int]] = [
        ("qv", 17, 4), (None, 5, 6), ("all", 3, 5), ("mlp", 16, 4), ("all", 9, 3),
    ]  # fmt: skip
    made: list[tuple[EngineRequest, Path | None]] = []
    for number, (name, length, max_tokens) in enumerate(cases):
        path = None if name is None else lab.adapters[name]
        params = SamplingParams(
            max_tokens=max_tokens, seed=number, ignore_eos=True, **({"temperature": 0.0} | sampling)
        )
        request = EngineRequest(
            request_id=number,
            tenant=f"t{number % 2}",
            adapter=None if path is None else digest_of(path),
            prompt_token_ids=prompt_of(length, number),
            sampling=params,
        )
        made.append((request, path))
    return made


def assert_crowded_engine_is_exact(lab: DeviceLab, *, overlap: bool) -> None:
    """Three adapters on two slots, chunked prefills, graphs of several sizes."""
    core = engine_of(lab, overlap=overlap)
    cases = requests_of(lab)
    assert_all_exact(lab, cases, run(core, [request for request, _ in cases]))


def assert_seeded_draws_are_the_same_however_steps_run(lab: DeviceLab) -> None:
    """Eager and awaited, planned ahead, and on static buffers."""
    ladder = lab.runner._ladder
    answers: list[dict[int, list[int]]] = []
    for overlap, static in [(False, False), (True, False), (True, True)]:
        lab.runner._ladder = ladder if static else None
        requests = [r for r, _ in requests_of(lab, temperature=1.0, min_p=0.01)][1:3]
        answers.append(run(engine_of(lab, overlap=overlap), requests))
    lab.runner._ladder = ladder
    assert answers[0] == answers[1] == answers[2]
    assert ladder is not None and any(rung.graphs for rung in ladder._rungs)


def decode_steadily(lab: DeviceLab, watch: AbstractContextManager[object], steps: int) -> None:
    """Decode a base row and an adapter's, some steps of them under a watch; all draw in each."""
    core = engine_of(lab, overlap=True)
    requests = [request for request, _ in requests_of(lab)][1:3]
    for request in requests:
        longer = msgspec.structs.replace(request.sampling, max_tokens=steps + 8)
        core.add("client", msgspec.structs.replace(request, sampling=longer))
    begun: set[int] = set()
    while len(begun) < len(requests):
        begun |= {output.request_id for _, output in core.step() if output.deltas}
    for _ in range(2):  # the first step on static buffers of their size, and the one behind it
        core.step()
    with watch:
        outputs = [{output.request_id for _, output in core.step()} for _ in range(steps)]
    assert outputs == [{1, 2}] * steps
    for request in requests:
        core.abort("client", request.request_id)
    while core.has_work:
        core.step()


def landed(transfer: Any) -> None:
    """Wait until an adapter is in its slot."""
    transfer._queued.result(60).wait()
    assert transfer.is_done() and transfer.error() is None


def assert_graphs_equal_eager_steps(
    lab: DeviceLab, sampler: GreedySampler, counts: tuple[int, ...], steps: int
) -> None:
    """Rows on the base and on two adapters; memory that is no row's is NaN before each run."""
    runner = lab.runner
    for slot, name in enumerate(("qv", "all")):
        transfer = runner.install_adapter(slot, lab.weights[digest_of(lab.adapters[name])])
        if transfer is not None:
            landed(transfer)
    ladder = runner._ladder
    assert ladder is not None
    for count in counts:
        runs: list[list[HandSequence]] = []
        for used in (None, ladder):
            runner._ladder = used
            runner._kv_cache._storage.fill_(float("nan"))
            driver: Any = HandDriver(runner, sampler, lab.built.num_kv_blocks)  # type: ignore[arg-type]
            rows = [driver.add(prompt_of(3 + 2 * i, i), [None, 0, 1][i % 3]) for i in range(count)]
            for row in rows:
                driver.generate([row], 1)
            driver.generate(rows, 1 + steps)
            runs.append(rows)
        for eager, static in zip(*runs, strict=True):
            assert eager.output == static.output
            expected, got = torch.stack(eager.logits), torch.stack(static.logits)
            assert len(got) == 1 + steps
            assert (got - expected).abs().max() <= CLOSE * expected.abs().max(), "or NaN"
    assert {True, False} == {kind for rung in ladder._rungs for kind in rung.graphs}


def assert_a_slot_filled_beside_steps_is_exact(lab: DeviceLab, sampler: GreedySampler) -> None:
    """A base row decodes while an adapter is on its way; then a row decodes with it."""
    runner = lab.runner
    driver: Any = HandDriver(runner, sampler, lab.built.num_kv_blocks)  # type: ignore[arg-type]
    beside = driver.add(prompt_of(5, 1))
    driver.generate([beside], 1)
    adapter = lab.adapters["mlp"]
    runner.clear_slot(1)
    transfer = runner.install_adapter(1, lab.weights[digest_of(adapter)])
    driver.generate([beside], 3)
    landed(transfer)
    row = driver.add(prompt_of(6, 2), 1)
    driver.generate([row], 1)
    driver.generate([row, beside], 4)
    for sequence, path in ((beside, None), (row, adapter)):
        reference = PeftReference(lab.model_dir, path)
        assert_exact(sequence.output, reference.greedy(sequence.prompt, len(sequence.output)))
