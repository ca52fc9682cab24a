"""The GPU's path from requests to tokens, its kernels in Triton's interpreter, against PEFT.

Attention, norms, rotation, activations and adapters are the kernels that a GPU would run, on static
buffers where a GPU would replay a graph; scheduler, blocks, slots and sampler are the engine's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.build_runner import BuiltRunner
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.device.build import build_device_runner
from engine.device.device_runner import DeviceRunner
from engine.device.setup import interpreter_setup
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
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


@dataclass
class Lab:
    model_dir: Path
    adapters: dict[str, Path]
    built: BuiltRunner
    weights: dict[str, Any]

    @property
    def runner(self) -> DeviceRunner:
        assert isinstance(self.built.runner, DeviceRunner)
        return self.built.runner


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("device")
    model_dir = make_tiny_model(folder / "base", "llama", **SMALL)
    adapters = {
        name: make_tiny_adapter(folder / name, model_dir, **config)
        for name, config in ADAPTERS.items()
    }
    built = build_device_runner(
        model_dir,
        interpreter_setup(max_loras=2, max_lora_rank=8),
        dtype="float32",
        num_kv_blocks=8,
        max_num_seqs=3,
        max_num_batched_tokens=12,
        max_model_len=64,
    )
    weights = {
        digest_of(path): built.load_adapter(digest_of(path), path) for path in adapters.values()
    }
    return Lab(model_dir, adapters, built, weights)


def engine_of(lab: Lab, *, overlap: bool) -> EngineCore:
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
    lab: Lab, cases: list[tuple[EngineRequest, Path | None]], tokens: dict[int, list[int]]
) -> None:
    for request, path in cases:
        reference = PeftReference(lab.model_dir, path)
        alone = reference.greedy(request.prompt_token_ids, request.sampling.max_tokens)
        assert_exact(tokens[request.request_id], alone)


def requests_of(lab: Lab, **sampling: Any) -> list[tuple[EngineRequest, Path | None]]:
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


def test_a_base_row_and_an_adapters_beside_it_equal_peft(lab: Lab):
    cases = [
        (msgspec.structs.replace(request, sampling=short), path)
        for request, path in requests_of(lab)[1:3]
        for short in [msgspec.structs.replace(request.sampling, max_tokens=3)]
    ]
    tokens = run(engine_of(lab, overlap=True), [request for request, _ in cases])
    assert_all_exact(lab, cases, tokens)


def test_an_adapter_with_norms_and_an_output_layer_of_its_own_equals_peft(lab: Lab, tmp_path: Path):
    own = {"target_modules": ["v_proj"], "modules_to_save": ["norm", "lm_head", "embed_tokens"]}
    path = make_tiny_adapter(tmp_path / "own", lab.model_dir, r=2, **own)
    digest = digest_of(path)
    lab.weights[digest] = lab.built.load_adapter(digest, path)
    cases = [
        (msgspec.structs.replace(request, adapter=adapter, sampling=short), folder)
        for (request, _), adapter, folder in zip(
            requests_of(lab)[1:3], (None, digest), (None, path), strict=True
        )
        for short in [msgspec.structs.replace(request.sampling, max_tokens=2)]
    ]
    tokens = run(engine_of(lab, overlap=True), [request for request, _ in cases])
    assert_all_exact(lab, cases, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_of_a_crowded_engine_equals_peft(lab: Lab, overlap: bool):
    """Three adapters on two slots, chunked prefills, graphs of several sizes."""
    core = engine_of(lab, overlap=overlap)
    cases = requests_of(lab)
    tokens = run(core, [request for request, _ in cases])
    assert_all_exact(lab, cases, tokens)


@pytest.mark.slow
def test_graphs_and_overlap_change_no_token_of_seeded_draws(lab: Lab):
    ladder = lab.runner._ladder
    answers: list[dict[int, list[int]]] = []
    for overlap, static in [(False, False), (True, False), (True, True)]:
        lab.runner._ladder = ladder if static else None
        requests = [r for r, _ in requests_of(lab, temperature=1.0, min_p=0.01)][1:3]
        answers.append(run(engine_of(lab, overlap=overlap), requests))
    lab.runner._ladder = ladder
    assert answers[0] == answers[1] == answers[2]
    assert ladder is not None and any(rung.graphs for rung in ladder._rungs)
