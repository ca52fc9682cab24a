"""The step that memory is measured by, and what a device's runner is built from."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.device import build as module
from engine.device.build import build_device_runner
from engine.device.device import HostDevice
from engine.device.memory_plan import DeviceFacts
from engine.device.model_steps import adapter_row_bytes
from engine.device.profile import profile_rows
from engine.device.setup import DeviceSetup, cuda_setup, interpreter_setup
from engine.errors import ConfigError
from engine.ops import TorchOps
from engine.runner.decode_ladder import DecodeLadder
from engine.sampling.launched import WaitingSampler
from engine.sampling.sampler import Sampler
from tests.support.tiny_models import make_tiny_model

MIB = 2**20


@pytest.mark.parametrize(
    ("num_tokens", "max_num_seqs", "max_model_len", "lengths"),
    [
        (10, 3, 100, [3, 3, 4]),
        (4, 8, 100, [1, 1, 1, 1]),
        (64, 2, 20, [20, 20]),
        (1, 1, 1, [1]),
    ],
)
def test_the_measured_step_fills_the_budget_with_rows_that_all_sample(
    num_tokens, max_num_seqs, max_model_len, lengths
):
    rows = profile_rows(num_tokens, max_num_seqs, max_model_len, 16)
    assert [len(row.token_ids) for row in rows] == lengths
    assert all(row.sampling is not None and row.slot is None for row in rows)
    assert {block for row in rows for block in row.block_table} == {0}
    assert all(len(row.block_table) == -(-len(row.token_ids) // 16) for row in rows)


class MeasuringDevice(HostDevice):
    """Says what it has, and what calls take: the n-th one n MiB."""

    def __init__(self, facts: list[DeviceFacts]) -> None:
        super().__init__()
        self._facts = facts
        self.num_calls = 0

    def facts(self) -> DeviceFacts:
        return self._facts.pop(0) if len(self._facts) > 1 else self._facts[0]

    def peak_of(self, function: Callable[[], object]) -> int:
        function()
        self.num_calls += 1
        return self.num_calls * MIB


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


def setup_of(device: HostDevice) -> DeviceSetup:
    setup = interpreter_setup(max_loras=2, max_lora_rank=8)
    return replace(
        setup,
        device=device,
        make_ops=lambda max_positions: TorchOps(),
        make_sampler=lambda config, grammars: WaitingSampler(
            Sampler(config.vocab_size, config.eos_token_ids)
        ),
    )


def build(model_dir, device, **settings):
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "max_model_len": 100} | settings
    return build_device_runner(model_dir, setup_of(device), **options)


def test_the_plan_is_made_of_what_was_measured(model_dir, monkeypatch):
    seen = {}
    plan_memory = module.plan_memory

    def spy(facts, needs, **options):
        seen.update(facts=facts, needs=needs)
        return plan_memory(facts, needs, **options)

    monkeypatch.setattr(module, "plan_memory", spy)
    before = DeviceFacts("tiny", total=256 * MIB, free=250 * MIB, own=MIB)
    loaded = DeviceFacts("tiny", total=256 * MIB, free=240 * MIB, own=11 * MIB)
    device = MeasuringDevice([before, loaded])
    built = build(model_dir, device)
    needs = seen["needs"]
    row_bytes = adapter_row_bytes(built.runner._decoder, built.runner._decoder.dtype)
    assert needs.adapter_rows == 16 and needs.adapter_row_bytes == row_bytes
    # q, k, v of 64, 32, 32; gate and up of 96: the widths of a pool are whole sixteens.
    layer = 3 * 64 + 64 + 32 + 32 + (64 + 64) + 2 * 64 + 2 * 96 + (96 + 64)
    assert row_bytes == 4 * (3 * layer + 64 + 272)
    assert needs.weights == 10 * MIB - 16 * row_bytes
    assert (needs.activations, needs.graph_tensors) == (1 * MIB, 2 * MIB), "two steps were run"
    assert needs.num_graphs == 2 * 3, "1, 2 and 3 rows, with and without adapters"
    held = [rung.buffers for rung in built.runner._ladder._rungs]
    batches = [built.runner._stager._lora, built.runner._stager._logit_lora]
    batches += [buffers.lora for buffers in held]
    logits = 3 * 272 * 4
    assert needs.buffers == logits + sum(
        [
            *(batch._buffer.nbytes + batch.shrunk.nbytes for batch in batches),
            *(each._tensors.nbytes + each.inputs.logit_tokens.nbytes for each in held),
        ]
    )
    assert built.num_kv_blocks == 3 * 7, "as many as its sequences need"
    assert built.runner._kv_cache.num_blocks == 22
    assert built.max_model_len == 100


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic(model_dir):
    small = DeviceFacts("tiny", total=12 * MIB, free=11 * MIB, own=MIB)
    with pytest.raises(ConfigError, match=r"(?s)not one sequence.*memory of tiny: 12.0 MiB"):
        build(model_dir, MeasuringDevice([small]), gpu_memory_utilization=0.2)


class FullDevice(MeasuringDevice):
    """Has no room for the n-th step that is measured."""

    def __init__(self, full_at: int) -> None:
        super().__init__([DeviceFacts("tiny", 256 * MIB, 3 * MIB, MIB)])
        self._full_at = full_at

    def peak_of(self, function: Callable[[], object]) -> int:
        if self.num_calls + 1 == self._full_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 MiB\nand more")
        return super().peak_of(function)


def test_what_runs_out_of_memory_while_it_is_measured_is_refused_and_told(model_dir):
    expected = (
        r"(?s)^a step of 40 tokens does not fit beside the weights\n"
        r"memory of tiny: 256.0 MiB, of which 3.0 MiB are free\n"
        r"CUDA out of memory. Tried to allocate 9 MiB$"
    )
    for full_at in (1, 2):
        with pytest.raises(ConfigError, match=expected):
            build(model_dir, FullDevice(full_at))


def test_a_plan_that_does_not_hold_is_refused_with_its_arithmetic(model_dir, monkeypatch):
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(DecodeLadder, "capture", no_room)
    device = MeasuringDevice([DeviceFacts("tiny", 256 * MIB, 250 * MIB, MIB)])
    with pytest.raises(ConfigError, match=r"(?s)^lower gpu_memory_utilization.*KV cache.*of tiny"):
        build(model_dir, device)
    monkeypatch.setattr(module, "load_decoder", no_room)
    with pytest.raises(ConfigError, match=r"(?s)^the model's weights and the adapters' rows do"):
        build(model_dir, device)


@pytest.mark.parametrize(
    ("rank", "settings", "message"),
    [
        (512, {}, "max_lora_rank is at most 256 on a device, not 512"),
        (8, {"dtype": "int8"}, "dtype must be auto or one of float32, bfloat16, float16"),
        (8, {"max_model_len": 10_000}, "max_model_len 10000 is more than"),
    ],
)
def test_a_setting_that_can_never_work_is_refused(model_dir, rank, settings, message):
    device = MeasuringDevice([DeviceFacts("tiny", 256 * MIB, 250 * MIB, MIB)])
    setup = replace(setup_of(device), max_lora_rank=rank)
    with pytest.raises(ConfigError, match=message):
        build_device_runner(model_dir, setup, **settings)


def test_eight_bits_hold_twice_as_many_keys_of_a_half_precision_model_and_none_of_a_float32(
    model_dir, monkeypatch
):
    seen = []

    def refuse(facts, needs, **options):
        seen.append(needs.bytes_per_block)
        raise ConfigError("seen")

    monkeypatch.setattr(module, "plan_memory", refuse)
    for cache in ("auto", "fp8"):
        with pytest.raises(ConfigError, match="seen"):
            build(model_dir, HostDevice(), dtype="bfloat16", kv_cache_dtype=cache)
    assert seen[0] == 2 * seen[1] > 0
    for dtype, cache, message in (
        ("float32", "fp8", "kv_cache_dtype: fp8 holds keys and values of bfloat16 and float16"),
        ("bfloat16", "int8", "kv_cache_dtype must be auto or fp8, not 'int8'"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(model_dir, HostDevice(), dtype=dtype, kv_cache_dtype=cache)


def test_a_machine_without_a_gpu_refuses_to_run_on_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device: PyTorch finds no CUDA device"):
        cuda_setup(max_loras=1, max_lora_rank=8)
