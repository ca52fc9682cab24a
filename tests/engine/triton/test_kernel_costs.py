"""The roofline sheet: its arithmetic, and that the document holds what the script prints."""

import doctest
from pathlib import Path

import pytest

from engine.triton import kernel_costs
from engine.triton.kernel_costs import LLAMA_3_8B, QWEN_2_5_05B, sheet, table

DOCUMENT = Path(__file__).parents[3] / "docs" / "gpu-kernels.md"


def test_the_examples_hold():
    found = doctest.testmod(kernel_costs)
    assert found.failed == 0
    assert found.attempted > 6


@pytest.mark.parametrize("model", [LLAMA_3_8B, QWEN_2_5_05B], ids=lambda model: model.name)
def test_the_document_holds_the_sheet(model):
    assert table(model) in DOCUMENT.read_text()


def test_a_prompts_attention_is_the_sum_of_its_chunks_in_operations_and_less_in_bytes():
    whole = LLAMA_3_8B.attention(1, 2048, 0)
    chunks = [LLAMA_3_8B.attention(1, 512, start) for start in range(0, 2048, 512)]
    assert sum(chunk.flops for chunk in chunks) == whole.flops
    assert sum(chunk.num_bytes for chunk in chunks) > whole.num_bytes


def test_a_decode_steps_floor_is_that_of_weights_and_keys_and_values():
    step = sum(
        launches * cost.num_bytes
        for kernel, of, launches, cost in sheet(LLAMA_3_8B)
        if of == "32 rows" and kernel in ("attention", "(linears)")
    )
    weights = 2 * (8.03e9 - 2 * 128256 * 4096)  # without embedding and head
    kept = 2 * 2 * 32 * 1024 * 1024 * 32
    assert step == pytest.approx(weights + kept, rel=0.02)
