"""The arithmetic of a GPU's memory, with numbers of real models and GPUs."""

from dataclasses import replace

import pytest

from engine.device.memory_plan import GRAPH_BYTES, DeviceFacts, MemoryNeeds, plan_memory
from engine.errors import ConfigError

GIB = 2**30
H100 = DeviceFacts("NVIDIA H100 80GB", total=80 * GIB, free=62 * GIB, own=16 * GIB)
LLAMA_3_8B = MemoryNeeds(
    weights=15 * GIB,
    activations=GIB,
    num_graphs=46,
    graph_tensors=GIB // 4,
    buffers=GIB // 8,
    adapter_rows=512,
    # A of q, k, v, o, gate, up: 4096, of down: 14336; B: 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096.
    # Then the output layer's, of which an adapter may have one too.
    adapter_row_bytes=2 * 32 * (6 * 4096 + 14336 + 3 * 4096 + 2 * 1024 + 2 * 14336)
    + 2 * (4096 + 128_256),
    bytes_per_block=32 * 2 * 8 * 128 * 16 * 2,
    block_size=16,
    max_num_batched_tokens=8192,
    max_num_seqs=256,
    max_model_len=8192,
    max_loras=8,
    max_lora_rank=64,
)


def test_what_is_left_is_the_kv_cache_in_whole_blocks_and_two_are_spare():
    plan = plan_memory(H100, LLAMA_3_8B, utilization=0.9)
    others = 2 * GIB
    adapters = 512 * 5_507_584
    graphs = 46 * GRAPH_BYTES + GIB // 4
    left = int(80 * GIB * 0.9) - others - 15 * GIB - GIB - graphs - GIB // 8 - adapters
    assert plan.num_kv_blocks == left // (2 * 2**20) - 2
    assert plan.num_kv_blocks * 16 == 414_800, "tokens"


def test_the_arithmetic_is_told_line_by_line_and_adds_up():
    lines = plan_memory(H100, LLAMA_3_8B, utilization=0.9).lines
    assert lines[0] == "memory of NVIDIA H100 80GB: 80.0 GiB, of which 62.0 GiB are free"
    assert lines[1] == "     72.0 GiB  may be used  gpu_memory_utilization 0.9"
    assert [line[:27].split() for line in lines[2:9]] == [
        ["-", "2048.0", "MiB", "others"],
        ["-", "15.0", "GiB", "weights"],
        ["-", "1024.0", "MiB", "activations"],
        ["-", "624.0", "MiB", "graphs"],
        ["-", "128.0", "MiB", "buffers"],
        ["-", "2689.2", "MiB", "adapters"],
        ["=", "50.6", "GiB", "left"],
    ]
    assert "25925 blocks of 16 and 2 spare: 414800 tokens, 50.6 sequences" in lines[9]
    sizes = [72 * 1024, 2048, 15 * 1024, 1024, 624, 128, 2689]
    assert (sizes[0] - sum(sizes[1:])) / 1024 == pytest.approx(50.6, abs=0.05)


def test_a_small_model_takes_no_more_than_all_its_sequences_need():
    needs = replace(LLAMA_3_8B, bytes_per_block=2**18, max_num_seqs=4, max_model_len=1000)
    assert plan_memory(H100, needs, utilization=0.9).num_kv_blocks == 4 * 63


def test_blocks_that_are_asked_for_are_taken_where_they_fit():
    plan = plan_memory(H100, LLAMA_3_8B, utilization=0.9, num_kv_blocks=600)
    assert plan.num_kv_blocks == 600
    with pytest.raises(ConfigError, match="num_kv_blocks 25926 do not fit: 25925 do"):
        plan_memory(H100, LLAMA_3_8B, utilization=0.9, num_kv_blocks=25_926)


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({"weights": 71 * GIB}, 8 * GIB),
        ({"adapter_rows": 256 * 64}, 62 * GIB),
        ({"activations": 60 * GIB}, 62 * GIB),
        ({"max_model_len": 500_000}, 62 * GIB),
        ({}, 10 * GIB),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(changes, free):
    facts = replace(H100, free=free)
    with pytest.raises(ConfigError) as error:
        plan_memory(facts, replace(LLAMA_3_8B, **changes), utilization=0.9)
    message = str(error.value)
    assert message.startswith("not one sequence of max_model_len ")
    for part in ("max_num_batched_tokens", "weights", "adapters", "may be used", "KV cache"):
        assert part in message


def test_the_smallest_device_that_fits_one_sequence_fits_one_and_a_block_less_does_not():
    needs = replace(LLAMA_3_8B, max_num_seqs=1)
    graphs = 46 * GRAPH_BYTES + GIB // 4 + GIB // 8
    total = 15 * GIB + GIB + graphs + 512 * 5_507_584 + 514 * 2 * 2**20
    facts = DeviceFacts("tight", total=total, free=total - 15 * GIB, own=15 * GIB)
    assert plan_memory(facts, needs, utilization=1.0).num_kv_blocks == 512
    less = replace(facts, total=total - 1, free=facts.free - 1)
    with pytest.raises(ConfigError, match=r"it needs 512 KV blocks of 2\.0 MiB, there are 511"):
        plan_memory(less, needs, utilization=1.0)


@pytest.mark.parametrize("utilization", [0.0, -0.5, 1.01])
def test_a_utilization_that_is_no_share_is_refused(utilization):
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be above 0 and up to 1"):
        plan_memory(H100, LLAMA_3_8B, utilization=utilization)
