"""What a start compiles, and that no eager step launches anything else.

Launches are noted and not run: what they would be compiled for is known before they are.
"""

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from engine.device.build import build_device_runner
from engine.device.device_runner import DeviceRunner
from engine.device.profile import trial_row
from engine.device.setup import interpreter_setup
from engine.device.warm_up import adapted_steps, decode_counts, warm_up
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SamplingRow, ScheduledBatch, ScheduledRow
from engine.triton.tiles import choose_num_splits
from lora_kernels import LoraSlice
from lora_kernels.device_kernels import PinnedWeights
from lora_kernels.kernel_call import KernelCall
from lora_kernels.tiles import SMALL_BATCH_ROWS, pick_variant
from tests.support.tiny_models import make_tiny_model

WIDE = {
    "hidden_size": 1088,  # sums over so many inputs are split in small batches
    "num_attention_heads": 17,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
LIMITS = {"max_num_seqs": 14, "max_num_batched_tokens": 300, "max_model_len": 300}
MAX_LORAS = 10
ALIKE = {"stride_table", "num_slots"}
"""Arguments that kernels are told not to be compiled for."""


def kind_of(call: KernelCall) -> tuple[object, ...]:
    """What Triton compiles for, all that differs from one launch to another."""
    constants = tuple(sorted(call.constants.items()))
    arguments = tuple((name, _kind(name, value)) for name, value in call.arguments.items())
    return call.kernel.__name__, constants, arguments, call.num_warps, call.num_stages


def _kind(name: str, value: Tensor | int | float) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, float) or name in ALIKE:
        return type(value)
    return value == 1, value % 16 == 0, -(2**31) <= value < 2**31


class Lab:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: set[tuple[object, ...]] = set()
        monkeypatch.setattr(KernelCall, "run", lambda call: self.launched.add(kind_of(call)))
        model_dir = make_tiny_model(folder / "wide", "mistral", **WIDE)
        setup = interpreter_setup(max_loras=MAX_LORAS, max_lora_rank=8)
        built = build_device_runner(
            model_dir, setup, dtype="float32", num_kv_blocks=300, decode_ladder=False, **LIMITS
        )
        assert isinstance(built.runner, DeviceRunner)
        self.runner = built.runner
        assert not self.launched

    def warm_up(self) -> set[tuple[object, ...]]:
        runner = self.runner
        warm_up(
            runner._decoder, runner._kv_cache, runner._attention, runner._sampler, runner._stager,
            pin=lambda values: values, max_loras=MAX_LORAS, **LIMITS,
        )  # fmt: skip
        found, self.launched = self.launched, set()
        return found

    def fill_slots(self) -> None:
        for projection in self.runner.projections.values():
            table = projection.lora
            for slot in range(MAX_LORAS):
                slices = [
                    LoraSlice(torch.zeros(1 + slot % 8, table.in_features),
                              torch.zeros(size, 1 + slot % 8), 1.0)
                    for size in table.slice_sizes
                ]  # fmt: skip
                projection.install(slot, PinnedWeights.pack(slices, torch.float32, lambda v: v))


def random_rows(random: Random) -> list[ScheduledRow]:
    rows: list[ScheduledRow] = []
    slots = random.choice([[None], [0], [None, 0, 3], list(range(MAX_LORAS))])
    left = random.choice([LIMITS["max_num_batched_tokens"], 40])
    for number in range(random.randrange(1, LIMITS["max_num_seqs"] + 1)):
        length = min(random.choice([1, 1, 1, 2, 4, 26, 30, 258]), left)
        if not length:
            break
        left -= length
        start = random.choice([0, 0, 17])
        params = SamplingParams(
            max_tokens=1, seed=0, temperature=random.choice([0.0, 1.0]),
            top_k=random.choice([0, 5]), logit_bias={3: 1.0} if random.random() < 0.2 else {},
            logprobs=random.choice([None, None, 0, 1, 2, 3, 5, 11, 20]),
        )  # fmt: skip
        row = trial_row(number, length, 16, slot=random.choice(slots))
        sampling = SamplingRow(params, (0,), [0] * length, length)
        rows.append(
            row._replace(
                start=start,
                block_table=[0] * -(-(start + length) // 16),
                sampling=sampling if random.random() < 0.8 else None,
            )
        )
    return rows


def test_no_eager_step_launches_what_was_not_compiled_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lab = Lab(tmp_path, monkeypatch)
    compiled = lab.warm_up()
    assert not any(projection.is_adapted for projection in lab.runner.projections.values())
    lab.fill_slots()
    random = Random(7)
    for _ in range(60):
        lab.runner.launch(ScheduledBatch(rows=random_rows(random))).result()
    unforeseen = {str(kind[:2]) for kind in lab.launched - compiled}
    assert not unforeseen
    # The steps were many enough to meet nearly all that was compiled.
    assert len(lab.launched) > 0.8 * len(compiled)


@pytest.mark.parametrize(
    "limits",
    [
        (1, 40, 2048, 100),
        (8, 256, 8192, 8192),
        (9, 32, 300, 64),
        (64, 5, 256, 4096),
        (64, 400, 2048, 64),
    ],
)
def test_trial_steps_meet_every_variant_that_a_step_can_have(limits: tuple[int, int, int, int]):
    max_loras, max_num_seqs, max_num_batched_tokens, max_model_len = limits
    met, met_by_logits = set[tuple[str, bool]](), set[tuple[str, bool]]()
    for rows in adapted_steps(*limits):
        assert len(rows) <= max_num_seqs and max(length for _, length in rows) <= max_model_len
        num_tokens = sum(length for _, length in rows)
        assert num_tokens <= max_num_batched_tokens
        num_slots = len({slot for slot, _ in rows})
        assert num_slots <= max_loras
        variant = pick_variant(num_tokens, num_slots, batch_invariant=False)
        met.add((variant, num_tokens <= SMALL_BATCH_ROWS))
        variant = pick_variant(len(rows), num_slots, batch_invariant=False)
        met_by_logits.add((variant, len(rows) <= SMALL_BATCH_ROWS))

    def possible(most: int) -> set[tuple[str, bool]]:
        return {
            (pick_variant(tokens, slots, batch_invariant=False), tokens <= SMALL_BATCH_ROWS)
            for slots in range(1, min(max_loras, max_num_seqs) + 1)
            for tokens in range(slots, most + 1)
        }

    assert met == possible(min(max_num_batched_tokens, max_num_seqs * max_model_len))
    assert met_by_logits == possible(min(max_num_batched_tokens, max_num_seqs))


@pytest.mark.parametrize("max_num_seqs", [1, 3, 48, 256])
def test_trial_steps_meet_every_number_of_splits(max_num_seqs: int):
    counts = decode_counts(max_num_seqs)
    assert counts[-1] == max_num_seqs
    for kv_heads in (1, 2, 8):
        for positions in (300, 8192):

            def splits(rows: int, kv_heads: int = kv_heads, positions: int = positions) -> int:
                return choose_num_splits(rows, kv_heads, positions, 90)

            assert {splits(n) for n in range(1, max_num_seqs + 1)} == {splits(n) for n in counts}
