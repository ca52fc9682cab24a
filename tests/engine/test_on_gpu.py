"""What only a CUDA device can show: `pytest -m gpu`, which runs these tests alone.

The bodies that they share with other tests run there in Triton's interpreter.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from triton import knobs

from engine.device.cuda_device import CudaDevice
from engine.device.setup import cuda_setup
from engine.runner.decode_ladder import ladder_sizes
from lora_kernels.kernel_call import is_interpreted
from tests.support.device_lab import (
    DeviceLab,
    assert_a_slot_filled_beside_steps_is_exact,
    assert_crowded_engine_is_exact,
    assert_graphs_equal_eager_steps,
    assert_seeded_draws_are_the_same_however_steps_run,
    decode_steadily,
    make_device_lab,
)
from tests.support.hand_driver import GreedySampler

pytestmark = [
    pytest.mark.gpu,
    # PyTorch says of its debug mode that it is a prototype.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

MAX_NUM_SEQS = 40
LONG = 500_000_000
"""Cycles of a device: some tenths of a second."""


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    assert not is_interpreted(), "these tests run alone: pytest -m gpu"
    return CudaDevice()


@pytest.fixture(scope="module")
def lab(device: CudaDevice, tmp_path_factory: pytest.TempPathFactory) -> DeviceLab:
    return make_device_lab(tmp_path_factory.mktemp("gpu"), cuda_setup(max_loras=2, max_lora_rank=8))


@pytest.fixture(scope="module")
def hand_lab(
    device: CudaDevice, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DeviceLab, GreedySampler]:
    sampler = GreedySampler()
    lab = make_device_lab(
        tmp_path_factory.mktemp("hand"),
        cuda_setup(max_loras=2, max_lora_rank=8),
        sampler,
        num_kv_blocks=8 * MAX_NUM_SEQS,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=128,
        max_model_len=128,
    )
    return lab, sampler


def test_no_step_of_a_crowded_engine_compiles_a_kernel(
    device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first test, before any other has had kernels compiled."""
    lab = make_device_lab(tmp_path, cuda_setup(max_loras=2, max_lora_rank=8))
    compiled: list[str] = []

    def note(*_: object, **call: object) -> bool:
        compiled.append(str(call.get("repr")))
        return False

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    assert_crowded_engine_is_exact(lab, overlap=True)
    assert not compiled


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Within, whatever makes the host wait for the device raises; waiting for an event may."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_of_a_crowded_engine_equals_peft(lab: DeviceLab, overlap: bool):
    assert_crowded_engine_is_exact(lab, overlap=overlap)


def test_graphs_and_overlap_change_no_token_of_seeded_draws(lab: DeviceLab):
    assert_seeded_draws_are_the_same_however_steps_run(lab)


def test_a_steady_decode_step_synchronises_nothing_in_secret(lab: DeviceLab):
    decode_steadily(lab, no_synchronisation(), 8)


def test_the_debug_mode_would_have_seen_it(device: CudaDevice):
    values = torch.ones(4, device=device.torch_device)
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchronizing"):
        values.sum().item()


def test_graphs_of_all_sizes_equal_eager_steps(hand_lab: tuple[DeviceLab, GreedySampler]):
    sizes = ladder_sizes(MAX_NUM_SEQS)
    counts = tuple(sorted({count for size in sizes for count in (max(1, size - 1), size)}))
    assert_graphs_equal_eager_steps(*hand_lab, counts=counts, steps=4)


def test_a_slot_that_is_filled_beside_steps_is_exact(hand_lab: tuple[DeviceLab, GreedySampler]):
    assert_a_slot_filled_beside_steps_is_exact(*hand_lab)


def test_a_mark_is_done_once_what_was_queued_before_it_is(device: CudaDevice):
    torch.cuda._sleep(LONG)
    mark = device.mark()
    assert not mark.is_done()
    mark.wait()
    assert mark.is_done()


def test_what_is_put_aside_waits_for_its_mark_and_the_main_stream_not_for_it(device: CudaDevice):
    source = torch.zeros(1024, device=device.torch_device)
    copied = torch.zeros_like(source)
    torch.cuda._sleep(LONG)
    source.fill_(1.0)
    with device.aside(device.mark()):
        copied.copy_(source)
        torch.cuda._sleep(4 * LONG)
        aside = device.mark()
    source.add_(1.0)
    main = device.mark()
    main.wait()
    assert not aside.is_done(), "the main stream went on"
    aside.wait()
    assert copied.eq(1.0).logical_or(copied.eq(2.0)).all(), "after the mark, never before"


def test_a_copy_to_the_host_is_there_with_its_mark_and_sent_values_may_change(device: CudaDevice):
    values = torch.arange(4096, dtype=torch.float32).numpy()
    torch.cuda._sleep(LONG)
    sent = device.send(values)
    values[:] = -1.0
    host, mark = device.fetch(sent * 2)
    mark.wait()
    assert host.is_pinned() and torch.equal(host, 2 * torch.arange(4096, dtype=torch.float32))
