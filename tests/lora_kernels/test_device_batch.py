import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_kernels import LoraBatch
from lora_kernels.device_batch import DeviceLoraBatch
from lora_kernels.tiles import VARIANTS, Variant, pick_variant, split_k, tiles_for

runs = st.lists(st.tuples(st.sampled_from([None, 0, 1, 2, 3]), st.integers(0, 40)), max_size=8)


def make_batch(
    max_rows: int = 320,
    *,
    batch_invariant: bool = False,
    variant: Variant | None = None,
    max_segments: int = 4,
    max_rank: int = 16,
) -> DeviceLoraBatch:
    return DeviceLoraBatch(
        max_rows,
        max_segments,
        max_slices=2,
        max_rank=max_rank,
        dtype=torch.bfloat16,
        device="cpu",
        batch_invariant=batch_invariant,
        variant=variant,
        architecture=90,
    )


def entries(batch: DeviceLoraBatch) -> list[tuple[int, int]]:
    """(row, slot) pairs in the order in which the launched tiles take them."""
    found: list[tuple[int, int]] = []
    for slot, start, count in batch.tile_map[: batch.num_tiles].tolist():
        assert count <= batch.tiles.rows
        rows = batch.permutation[start : start + count].tolist()
        found += [(row, slot) for row in rows]
    return found


def expected_entries(batch: LoraBatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for index, slot in enumerate(batch.segment_slot):
        start, stop = batch.segment_indptr[index : index + 2]
        found += [(row, slot) for row in batch.permutation[start:stop].tolist()]
    return found


@settings(deadline=None)
@given(runs, st.sampled_from([None, *VARIANTS]))
def test_tiles_take_each_row_once_with_its_slot(steps, variant):
    batch = LoraBatch.from_runs([slot for slot, _ in steps], [length for _, length in steps])
    device = make_batch(variant=variant)
    device.update(LoraBatch.from_runs([3, 1], [160, 160]))  # leftovers to get rid of
    device.update(batch)
    assert entries(device) == expected_entries(batch)
    assert device.num_rows == batch.num_rows
    assert set(device.segment_slot) == {slot for _, slot in expected_entries(batch)}


@settings(deadline=None)
@given(runs)
def test_an_eager_batch_launches_no_tile_without_rows(steps):
    device = make_batch()
    device.update(LoraBatch.from_runs([s for s, _ in steps], [length for _, length in steps]))
    assert all(count > 0 for _, _, count in device.tile_map[: device.num_tiles].tolist())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_static_batch_keeps_its_grid_and_buffers(variant):
    device = make_batch(max_rows=40, variant=variant)
    grid = device.num_tiles
    addresses = (device.tile_map.data_ptr(), device.permutation.data_ptr())
    worst = LoraBatch.from_runs([0, 1, 2, 3], [1, 17, 1, 21])
    for batch in (worst, LoraBatch.from_runs([None], [40]), LoraBatch.from_runs([2], [40])):
        device.update(batch)
        assert (device.num_tiles, device.variant) == (grid, variant)
        assert entries(device) == expected_entries(batch)
    assert addresses == (device.tile_map.data_ptr(), device.permutation.data_ptr())


@pytest.mark.parametrize(
    ("slots", "lengths", "variant"),
    [
        ([0, 1, 2], [1, 2, 1], "bgmv"),
        ([0, 1], [4, 1], "sgmv_16"),
        ([0, 1], [40, 40], "sgmv_64"),
        ([0, None, 1], [1, 300, 1], "bgmv"),
    ],
)
def test_rows_a_segment_decide_the_variant(slots, lengths, variant):
    device = make_batch()
    device.update(LoraBatch.from_runs(slots, lengths))
    assert device.variant == variant


def test_one_variant_serves_all_batches_where_bits_must_not_depend_on_them():
    picked = {
        pick_variant(entries, segments, batch_invariant=True)
        for entries in (0, 1, 64, 4096)
        for segments in (1, 64)
    }
    assert picked == {"sgmv_16"}
    device = make_batch(batch_invariant=True)
    for lengths in ([1, 1], [300, 1]):
        device.update(LoraBatch.from_runs([0, 1], lengths))
        assert (device.variant, device.split_k(8192)) == ("sgmv_16", 1)
    with pytest.raises(ValueError, match="bgmv is not"):
        make_batch(batch_invariant=True, variant="bgmv")


def test_sums_are_split_for_small_batches_alone():
    device = make_batch()
    device.update(LoraBatch.from_runs([0], [256]))
    assert [device.split_k(size) for size in (64, 1024, 1025, 9000)] == [1, 1, 2, 4]
    device.update(LoraBatch.from_runs([0], [257]))
    assert device.split_k(9000) == 1
    assert make_batch(max_rows=512, variant="sgmv_16").split_k(9000) == 1
    assert split_k(2048) == 2


@pytest.mark.parametrize("rows", [1, 16, 257])
@pytest.mark.parametrize("parts", [1, 4])
def test_shrunk_rows_fit_whatever_the_batch_holds(rows, parts):
    device = make_batch(max_rows=320, max_rank=20)
    device.update(LoraBatch.from_runs([0], [rows]))
    parts = parts if rows <= 256 else 1
    view = device.shrunk_view(2, 20, parts)
    assert view.shape[0] == parts and view.shape[1] == 2
    assert view.shape[2] >= rows and view.shape[3] == 32


def test_a_table_larger_than_the_batch_was_made_for_is_refused():
    with pytest.raises(ValueError, match="3 slices and ranks up to 16"):
        make_batch(batch_invariant=True).shrunk_view(3, 16, 1)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (LoraBatch.from_runs([0], [321]), "321 rows"),
        (LoraBatch.from_runs([0, 1, 2, 3, 4], [1] * 5), "5 segments"),
        (LoraBatch(2, torch.tensor([0, 2]), (0, 2), (0,), (None,)), "no row of the 2"),
        (LoraBatch(2, torch.tensor([0, -1]), (0, 2), (0,), (None,)), "no row of the 2"),
        (LoraBatch(2, torch.tensor([0]), (0, 2), (0,), (None,)), "segments end at 2"),
    ],
)
def test_a_batch_past_the_capacity_is_refused_and_changes_nothing(batch, message):
    device = make_batch()
    held = LoraBatch.from_runs([1], [3])
    device.update(held)
    with pytest.raises(ValueError, match=message):
        device.update(batch)
    assert entries(device) == expected_entries(held)


def test_a_device_without_a_table_of_tiles_is_refused():
    with pytest.raises(ValueError, match=r"7\.5 is before 8\.0"):
        tiles_for("bgmv", torch.bfloat16, 75)
    assert tiles_for("bgmv", torch.bfloat16, 89) == tiles_for("bgmv", torch.bfloat16, 80)
    assert tiles_for("sgmv_16", torch.bfloat16, 120) == tiles_for("sgmv_16", torch.bfloat16, 100)
    with pytest.raises(ValueError, match="give `architecture`"):
        DeviceLoraBatch(1, 1, max_slices=1, max_rank=1, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_a_shrink_fills_whole_steps_of_the_expand(variant, dtype, architecture):
    tiles = tiles_for(variant, dtype, architecture)
    assert tiles.shrink.ranks % tiles.expand.ranks == 0
    assert 16 % tiles.shrink.ranks == 0
