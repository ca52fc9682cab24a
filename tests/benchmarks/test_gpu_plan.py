"""What `benchmarks/gpu_engine.py` measures on devices of some sizes."""

import pytest

from benchmarks.gpu_plan import FULL, SMALL, fitted, weight_bytes

GIB = 2**30


def test_on_a_device_of_80_gib_all_of_it_is_measured():
    assert fitted(FULL, 77 * GIB) == (FULL, [])
    assert fitted(SMALL, GIB) == (SMALL, [])
    assert weight_bytes(FULL.shape, FULL.dtype) == pytest.approx(16.06e9, rel=1e-3)


def test_on_a_device_of_40_gib_all_layers_are_and_smaller_batches():
    plan, notes = fitted(FULL, 39 * GIB)
    assert plan.shape == FULL.shape and plan.batches == (1, 2, 4, 8, 16, 32, 64, 128)
    assert notes == ["for lack of memory: no batches above 128"]


@pytest.mark.parametrize("gib", [2, 7, 15, 23, 31, 47])
def test_what_is_kept_leaves_room_for_adapters_and_peers_and_suffices_them(gib: int):
    plan, notes = fitted(FULL, gib * GIB)
    weights = weight_bytes(plan.shape, plan.dtype)
    cache = 2 * max(plan.batches) * plan.context * plan.shape.num_kv_values
    assert plan.peer_batch in plan.batches and plan.lora_batch in plan.batches
    assert plan.shape.num_layers >= 2
    if plan.shape.num_layers > 2:
        assert weights <= gib * GIB / 2
    if max(plan.batches) > plan.peer_batch:
        assert cache <= (gib * GIB - weights) / 2
    assert bool(notes) == (plan != FULL)
