import subprocess
import sys

import pytest
import torch

from lora_kernels import LoraBatch, add_lora
from tests.support.device_lora import assert_like_reference, device_batch, on_device
from tests.support.lora_cases import make_rows, make_table


def operands(dtype: torch.dtype = torch.float32):
    table = make_table(16, [8], [[4]], dtype=dtype)
    batch = LoraBatch.from_runs([0], [3])
    device = on_device(table, dtype)
    return (*make_rows(table, batch, dtype), table, batch, device, device_batch(batch, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_device_table_and_batch_take_the_device_path(dtype):
    y, x, table, batch, device, prepared = operands(dtype)
    got = y.clone()
    add_lora(got, x, device, prepared)
    assert not torch.equal(got, y)
    assert_like_reference(y, x, table, batch, got)


def test_rows_may_have_a_pitch():
    y, x, table, batch, device, prepared = operands()
    wide_y, wide_x = torch.zeros(3, 24), torch.zeros(3, 32)
    wide_y[:, 8:16], wide_x[:, 16:] = y, x
    add_lora(wide_y[:, 8:16], wide_x[:, 16:], device, prepared)
    assert_like_reference(y, x, table, batch, wide_y[:, 8:16])
    assert not wide_y[:, :8].any() and not wide_y[:, 16:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y, x: (y, x[:, :-1]), "x is"),
        (lambda y, x: (y[:, :-1], x), "y is"),
        (lambda y, x: (y[:-1], x[:-1]), "x has 2 rows"),
        (lambda y, x: (y, x.bfloat16()), "must be the same one of"),
        (lambda y, x: (y.double(), x.double()), "must be the same one of"),
        (lambda y, x: (y.to("meta"), x), "y on meta"),
        (lambda y, x: (y, x.T.contiguous().T), "columns must be adjacent"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    y, x, _, _, device, prepared = operands()
    y, x = change(y, x)
    with pytest.raises(ValueError, match=message):
        add_lora(y, x, device, prepared)


def test_a_slot_past_the_table_is_refused():
    y, x, _, _, device, prepared = operands()
    prepared.update(LoraBatch.from_runs([1], [3]))
    with pytest.raises(ValueError, match="slot 1 of 1"):
        add_lora(y, x, device, prepared)


@pytest.mark.parametrize("device_half", ["table", "batch"])
def test_half_a_device_is_refused(device_half):
    y, x, table, batch, device, prepared = operands()
    with pytest.raises(ValueError, match="both be for the CPU or both for a device"):
        if device_half == "table":
            add_lora(y, x, device, batch)
        else:
            add_lora(y, x, table, prepared)


def test_the_package_and_its_cpu_path_load_no_triton():
    code = """
import sys, torch
from lora_kernels import LoraBatch, LoraSlice, LoraTable, LoraWeights, add_lora
table = LoraTable(4, [4], 1)
part = LoraSlice(torch.ones(1, 4), torch.ones(4, 1), 1.0)
table.install(0, LoraWeights.fuse([part], torch.float32))
add_lora(torch.zeros(1, 4), torch.ones(1, 4), table, LoraBatch.from_runs([0], [1]))
sys.exit("triton" in sys.modules or "lora_kernels.triton_launch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
