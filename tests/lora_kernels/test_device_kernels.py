"""Adapters in pinned host memory, and what their pools take."""

import pytest
import torch

from lora_kernels import LoraBatch, LoraSlice
from lora_kernels.device_batch import DeviceLoraBatch
from lora_kernels.device_kernels import PinnedWeights, device_kernels, rank_rows, row_bytes
from lora_kernels.pool import RankRowPool

SLICES = [
    LoraSlice(torch.randn(5, 12), torch.randn(7, 5), 0.5),
    None,
    LoraSlice(torch.randn(3, 12), torch.randn(20, 3), 2.0),
]


def test_packed_slices_are_views_of_one_pinned_buffer_as_pages_take_them():
    pinned: list[torch.Tensor] = []

    def pin(values: torch.Tensor) -> torch.Tensor:
        pinned.append(values.clone())
        return pinned[-1]

    weights = PinnedWeights.pack(SLICES, torch.bfloat16, pin)
    assert len(pinned) == 1 and pinned[0].dtype is torch.bfloat16
    assert weights.nbytes == pinned[0].nbytes == 2 * (5 * (12 + 7) + 3 * (12 + 20))
    assert (weights.in_features, weights.slice_sizes) == (12, (7, None, 20))
    assert weights.slice(1) is None
    for index in (0, 2):
        part, given = weights.slice(index), SLICES[index]
        assert part is not None and given is not None
        assert torch.equal(part.a, given.a.to(torch.bfloat16))
        assert torch.equal(part.b, given.b.to(torch.bfloat16))
        assert part.scaling == given.scaling
        assert part.a.is_contiguous() and part.b.T.is_contiguous()
        assert part.a.untyped_storage().data_ptr() == pinned[0].untyped_storage().data_ptr()


def test_pinned_weights_count_what_the_allocator_of_pinned_memory_takes(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda values: True)
    weights = PinnedWeights.pack(SLICES, torch.bfloat16, lambda values: values)
    assert weights.nbytes == 512, "of 382 bytes"
    part = LoraSlice(torch.zeros(2, 12), torch.zeros(4, 2), 1.0)
    assert PinnedWeights.pack([part], torch.float32, lambda values: values).nbytes == 128


def test_slices_that_do_not_agree_are_refused():
    with pytest.raises(ValueError, match="A has 9 columns"):
        PinnedWeights.pack(
            [SLICES[0], LoraSlice(torch.randn(2, 9), torch.randn(4, 2), 1.0)],
            torch.float32,
            lambda values: values,
        )


def test_a_table_holds_what_was_packed_for_it():
    kernels = device_kernels(
        torch.device("cpu"), max_rank=8, pool_rows=rank_rows(2, 8), pin=lambda values: values
    )
    table = kernels.make_table(12, (7, 4, 20), 2, torch.float32)
    table.install(1, kernels.fuse(SLICES, torch.float32))
    assert table.largest_rank([0]) == 0 and table.largest_rank([1]) == 5
    record = table.slots[1].tolist()
    assert [part[0] for part in record] == [5, 0, 3]
    first = table.a_pool.rows[8 * record[0][2] :][:5, :12]
    assert torch.equal(first, SLICES[0].a)


def test_the_rows_that_are_counted_are_the_rows_that_are_taken():
    """Full slots of the highest rank fit, whatever the rank; the bytes are those of the pools."""
    for max_rank in (1, 8, 12, 64):
        rows = rank_rows(3, max_rank)
        kernels = device_kernels(
            torch.device("cpu"), max_rank=max_rank, pool_rows=rows, pin=lambda values: values
        )
        table = kernels.make_table(20, (33, 16), 3, torch.float32)
        full = [
            LoraSlice(torch.randn(max_rank, 20), torch.randn(out, max_rank), 1.0)
            for out in (33, 16)
        ]
        for slot in range(3):
            table.install(slot, kernels.fuse(full, torch.float32))
        pools = [table.a_pool, *table.b_pools]
        assert all(pool.num_free_pages == 0 for pool in pools)
        taken = sum(pool.rows.nbytes for pool in pools)
        assert taken == rows * row_bytes(20, (33, 16), torch.float32)


@pytest.mark.parametrize(
    ("pages", "rank"),
    [((0, 1, 2), 20), ((4, 1, 2, 0), 27), ((3,), 2), ((2, 1), 16), ((1, 2, 4, 5), 32)],
)
def test_a_write_reaches_its_pages_in_their_order_and_nothing_else(pages, rank):
    pool = RankRowPool(10, 48, dtype=torch.float32, device="cpu")
    pool.rows.fill_(float("nan"))
    values = torch.randn(rank, 10)
    pool.write(pages, values)
    for row in range(rank):
        place = pages[row // 8] * 8 + row % 8
        assert torch.equal(pool.rows[place, :10], values[row])
        pool.rows[place, :10] = float("nan")
    assert pool.rows.isnan().all()


def test_a_batch_is_empty_where_no_row_has_an_adapter_and_a_static_one_never():
    def batch(variant):
        return DeviceLoraBatch(
            8, 2, max_slices=1, max_rank=8, dtype=torch.float32, device="cpu",
            batch_invariant=False, variant=variant, architecture=90,
        )  # fmt: skip

    base = LoraBatch.from_runs([None, None], [1, 3])
    mixed = LoraBatch.from_runs([None, 4, 2], [1, 2, 1])
    assert base.is_empty and not mixed.is_empty
    ragged, static = batch(None), batch("bgmv")
    assert ragged.is_empty and not static.is_empty
    ragged.update(mixed)
    assert not ragged.is_empty
    assert (ragged.segment_slot, ragged.segment_indptr) == ((2, 4), (0, 1, 3))
    assert ragged.permutation[:3].tolist() == [3, 1, 2]
    for held in (ragged, static):
        held.update(base)
    assert ragged.is_empty and not static.is_empty
