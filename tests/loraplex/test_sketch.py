"""Sketches: as accurate as the paper says, mergeable in any order, and the library's equal."""

import ddsketch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.recorder.sketch import ACCURACY, Sketch, merge_packed, pack_all

seconds = st.one_of(st.just(0.0), st.floats(min_value=1e-5, max_value=1e5))
SHARES = (0.0, 0.5, 0.95, 0.99, 1.0)


@given(st.lists(seconds, min_size=1, max_size=60))
def test_quantiles_are_those_of_the_library(values: list[float]):
    theirs = ddsketch.DDSketch(ACCURACY)
    for value in values:
        theirs.add(value)
    assert Sketch.of(values).quantiles(*SHARES) == [theirs.get_quantile_value(s) for s in SHARES]


@given(st.lists(seconds, min_size=1, max_size=60))
def test_a_quantile_is_within_the_accuracy_of_the_value_of_its_rank(values: list[float]):
    ordered = sorted(values)
    for share, found in zip(SHARES, Sketch.of(values).quantiles(*SHARES), strict=True):
        exact = ordered[int(share * (len(ordered) - 1))]
        assert found is not None
        assert abs(found - exact) <= ACCURACY * exact * (1 + 1e-9)


@given(st.lists(st.lists(seconds, max_size=20), min_size=1, max_size=6), st.randoms())
def test_merged_in_any_order_they_are_the_sketch_of_all(parts: list[list[float]], random):
    whole = Sketch.of(value for part in parts for value in part)
    random.shuffle(parts)
    merged: dict[str, Sketch] = {}
    for part in parts:
        merge_packed(merged, pack_all({"queue": Sketch.of(part), "none": Sketch()}))
    assert "none" not in merged
    assert merged.get("queue", Sketch()).pack() == whole.pack()


def test_of_nothing_there_is_no_quantile():
    assert Sketch().quantiles(0.5, 0.99) == [None, None]


def test_a_value_takes_few_bytes():
    assert len(pack_all({"queue": Sketch.of([0.25])})) <= 16
