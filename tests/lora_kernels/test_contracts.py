import pytest
import torch

from lora_kernels import LoraBatch, LoraSlice, LoraTable, LoraWeights, add_lora
from tests.support.lora_cases import make_rows, make_table


def test_runs_become_one_segment_a_slot_and_base_rows_none():
    batch = LoraBatch.from_runs([3, None, 1, 3], [2, 1, 2, 1])
    assert batch.num_rows == 6
    assert batch.segment_slot == (1, 3)
    assert batch.segment_indptr == (0, 2, 5)
    assert batch.permutation.tolist() == [3, 4, 0, 1, 5]
    assert batch.segment_start == (3, None)


def test_a_batch_of_base_rows_has_no_segment():
    batch = LoraBatch.from_runs([None, None], [4, 1])
    assert (batch.num_rows, batch.num_segments, batch.permutation.numel()) == (5, 0, 0)


def test_fused_weights_give_back_their_slices_and_their_true_size():
    a, b = torch.randn(3, 8), torch.randn(5, 3)
    weights = LoraWeights.fuse([None, LoraSlice(a, b, 0.5)], torch.float32)
    part = weights.slice(1)
    assert weights.slice(0) is None and part is not None
    assert torch.equal(part.a, a) and torch.equal(part.b, b) and part.scaling == 0.5
    assert weights.nbytes == 4 * (3 * 8 + 5 * 3 + 3)


def test_fused_weights_are_rounded_to_the_models_dtype():
    part = LoraSlice(torch.full((1, 2), 1.001), torch.full((2, 1), 3.003), 1.0)
    weights = LoraWeights.fuse([part], torch.bfloat16)
    assert weights.a.dtype == torch.float32
    assert torch.equal(weights.a, part.a.bfloat16().float())


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((3, 8), (5, 2), "slice 0"),
        ((3,), (5, 3), "slice 0"),
        ((3, 9), (5, 3), "slice 1"),
    ],
)
def test_factors_that_do_not_fit_each_other_are_refused(a, b, message):
    good = LoraSlice(torch.zeros(3, 8), torch.zeros(5, 3), 1.0)
    bad = LoraSlice(torch.zeros(a), torch.zeros(b), 1.0)
    order = [good, bad] if message == "slice 1" else [bad, good]
    with pytest.raises(ValueError, match=message):
        LoraWeights.fuse(order, torch.float32)


@pytest.mark.parametrize(
    ("in_features", "sizes", "message"),
    [(9, [8], "9 inputs"), (16, [8, 8], "has 2"), (16, [7], "slice 0: B has 8 rows")],
)
def test_weights_that_do_not_fit_the_projection_are_refused_and_change_nothing(
    in_features, sizes, message
):
    weights = make_table(16, [8], [[4]]).weights(0)
    table = LoraTable(in_features, sizes, 1)
    with pytest.raises(ValueError, match=message):
        table.install(0, weights)
    assert table.weights(0) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y, x: (y, x[:, :-1]), "x is"),
        (lambda y, x: (y[:, :-1], x), "y is"),
        (lambda y, x: (y[:-1], x[:-1]), "x has 2 rows"),
        (lambda y, x: (y, x.bfloat16()), "must be one of"),
        (lambda y, x: (y.half(), x.half()), "must be one of"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    table = make_table(16, [8], [[4]])
    batch = LoraBatch.from_runs([0], [3])
    y, x = change(*make_rows(table, batch, torch.float32))
    with pytest.raises(ValueError, match=message):
        add_lora(y, x, table, batch)


def test_a_slot_past_the_table_is_refused():
    table = make_table(16, [8], [[4]])
    batch = LoraBatch.from_runs([1], [3])
    y, x = make_rows(table, batch, torch.float32)
    with pytest.raises(ValueError, match="slot 1 of 1"):
        add_lora(y, x, table, batch)
