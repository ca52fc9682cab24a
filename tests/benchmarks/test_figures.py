"""How the benchmarks count and print."""

import json
import math

import pytest

from benchmarks.serving.figures import markdown, over_passes, percentile, spread, write_json


def test_percentiles_lie_between_two_values():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, q) for q in (0.0, 0.5, 0.9, 1.0)] == pytest.approx([1, 3, 4.6, 5])
    assert percentile([7.0], 0.99) == 7.0


def test_a_spread_is_scaled_and_of_nothing_is_no_number():
    assert spread([1.0, 2.0, 6.0], 1e3) == pytest.approx({"mean": 3000, "p50": 2000, "p99": 5920})
    assert all(math.isnan(value) for value in spread([]).values())


def test_passes_show_their_extremes():
    assert over_passes([3.14159], 2) == "3.14"
    assert over_passes([300.0, 1234.0, 250.0]) == "300 (250-1,234)"


def test_a_table_lines_up_and_is_markdown():
    lines = markdown(("what", "n"), [["a", "1"], ["longer", "12,345"]]).splitlines()
    assert lines == [
        "| what   |      n |",
        "|--------|-------:|",
        "| a      |      1 |",
        "| longer | 12,345 |",
    ]


def test_json_is_written_where_it_is_asked_for(tmp_path):
    write_json(None, {"a": 1})
    write_json(tmp_path / "out.json", {"a": 1})
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_figures_of_no_gap_are_refused():
    with pytest.raises(IndexError):
        percentile([], 0.5)
