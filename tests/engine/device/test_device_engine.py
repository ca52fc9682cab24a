"""The GPU's path from requests to tokens, its kernels in Triton's interpreter, against PEFT.

Attention, norms, rotation, activations and adapters are the kernels that a GPU would run, on static
buffers where a GPU would replay a graph; scheduler, blocks, slots and sampler are the engine's.
"""

from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from engine.device.adapter_transfers import AdapterTransfers
from engine.device.setup import interpreter_setup
from tests.support.device_lab import (
    DeviceLab,
    assert_a_slot_filled_beside_steps_is_exact,
    assert_all_exact,
    assert_crowded_engine_is_exact,
    assert_graphs_equal_eager_steps,
    assert_seeded_draws_are_the_same_however_steps_run,
    decode_steadily,
    engine_of,
    make_device_lab,
    requests_of,
    run,
)
from tests.support.hand_driver import GreedySampler
from tests.support.model_lab import digest_of
from tests.support.tiny_models import make_tiny_adapter


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> DeviceLab:
    setup = interpreter_setup(max_loras=2, max_lora_rank=8)
    return make_device_lab(tmp_path_factory.mktemp("device"), setup)


@pytest.fixture(scope="module")
def hand_lab(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceLab, GreedySampler]:
    """Steps by hand, and transfers on a thread as a device with a side stream has them."""
    setup, sampler = interpreter_setup(max_loras=2, max_lora_rank=8), GreedySampler()
    lab = make_device_lab(tmp_path_factory.mktemp("hand"), setup, sampler)
    runner = lab.runner
    runner._transfers = AdapterTransfers(setup.device, runner._install, runner._clear)
    return lab, sampler


def test_a_base_row_and_an_adapters_beside_it_equal_peft(lab: DeviceLab):
    cases = [
        (msgspec.structs.replace(request, sampling=short), path)
        for request, path in requests_of(lab)[1:3]
        for short in [msgspec.structs.replace(request.sampling, max_tokens=3)]
    ]
    tokens = run(engine_of(lab, overlap=True), [request for request, _ in cases])
    assert_all_exact(lab, cases, tokens)


def test_an_adapter_with_norms_and_an_output_layer_of_its_own_equals_peft(
    lab: DeviceLab, tmp_path: Path
):
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
def test_every_request_of_a_crowded_engine_equals_peft(lab: DeviceLab, overlap: bool):
    assert_crowded_engine_is_exact(lab, overlap=overlap)


@pytest.mark.slow
def test_graphs_and_overlap_change_no_token_of_seeded_draws(lab: DeviceLab):
    assert_seeded_draws_are_the_same_however_steps_run(lab)


@pytest.mark.slow
def test_steady_decoding_draws_for_every_row_in_every_step(lab: DeviceLab):
    decode_steadily(lab, nullcontext(), 2)


@pytest.mark.slow
def test_static_steps_equal_eager_ones(hand_lab: tuple[DeviceLab, GreedySampler]):
    assert_graphs_equal_eager_steps(*hand_lab, counts=(1, 2, 3), steps=2)


@pytest.mark.slow
def test_a_slot_that_is_filled_beside_steps_is_exact(hand_lab: tuple[DeviceLab, GreedySampler]):
    assert_a_slot_filled_beside_steps_is_exact(*hand_lab)
