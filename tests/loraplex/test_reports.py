"""Reports: every value is in the plot and in the table beside it."""

import re
from xml.etree import ElementTree

import pytest

from loraplex.reports.axis import axis
from loraplex.reports.chart import chart
from loraplex.reports.html import render
from loraplex.reports.plots import (
    BarPlot,
    LinePlot,
    Note,
    Point,
    Report,
    Section,
    Series,
    line_table,
)

LINES = LinePlot(
    x_label="requests/s", y_label="tokens/s", marks=[(4, "best")],
    series=[
        Series("ours & theirs", [Point(1, 100), Point(4, 1500, 80), Point(9, 900)]),
        Series("b", [Point(4, 20)]),
    ],
)  # fmt: skip
BARS = BarPlot(
    x_label="ms", parts=["slot", "load"], bars=[("a<0>", [3.0, 1.0]), ("a1", [0.0, 2.0])]
)


@pytest.mark.parametrize(
    "values", [[0.0, 1.0], [0.003, 0.0071], [12, 98_000], [5.0], [], [-3, 3], [7.0, 7.0]]
)
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_an_axis_holds_all_values_between_round_ticks(values, scale):
    found = axis(values, 0, 100, scale=scale)
    shown = [value for value in values if found.scale == "linear" or value > 0]
    assert all(found.low <= value <= found.high for value in shown)
    assert list(found.ticks) == sorted(found.ticks) and 2 <= len(found.ticks) <= 12
    assert found(found.low) == 0 and found(found.high) == 100


def test_lines_show_every_point_with_its_value_and_spread():
    root = ElementTree.fromstring(chart(LINES, title="T & U"))
    hover = [title.text for title in root.iter() if title.tag.endswith("title")]
    assert hover[0] == "T & U" and len(hover) == 1 + 4
    assert "ours & theirs: 1,500 ± 80 (tokens/s) at 4 (requests/s)" in hover
    assert "best" in [text.text for text in root.iter() if text.tag.endswith("text")]


def test_bars_are_as_long_as_their_values():
    root = ElementTree.fromstring(chart(BARS))
    widths = {
        rect[0].text: float(rect.attrib["width"]) for rect in root.iter()
        if rect.tag.endswith("rect") and len(rect)
    }  # fmt: skip
    assert set(widths) == {"a<0>, slot: 3", "a<0>, load: 1", "a1, load: 2"}
    assert widths["a<0>, slot: 3"] == pytest.approx(3 * widths["a<0>, load: 1"], abs=0.2)


def test_a_table_has_the_values_of_all_series():
    table = line_table(LINES, 0)
    assert table.columns == ["requests/s", "ours & theirs", "b"]
    assert table.rows == [["1", "100", "-"], ["4", "1,500 ± 80", "20"], ["9", "900", "-"]]
    shares = LinePlot(x_label="x", y_label="share", series=[Series("s", [Point(1, 0.987)])])
    assert line_table(shares).rows == [["1", "0.987"]]


def test_a_page_escapes_what_it_is_given_and_loads_nothing():
    report = Report(
        title="<b>", lead="a & b", facts=[("<dt>", "1")], settings=[("model", "<x>")],
        sections=[Section(title="<s>", text="<t>", plot=LINES), Section(title="bars", plot=BARS)],
    )  # fmt: skip
    page = render(report)
    assert not re.search(r"<(b|dt|x|s|t)>(?!<)", page.replace("<dt>&lt;", "").replace("<b>", "!!"))
    assert "!!" not in page.replace("<b>", "!!")
    assert page.count("<svg") == 2 and "default-src 'none'" in page
    assert not re.search(r"(src|href|url\()=?[\"'(]?https?:", page)


def test_notes_are_escaped_and_say_how_bad_they_are():
    note = Note(
        title="a<b", level="critical", source="<here>", text="x<y", advice="<do>",
        figures=[("<n>", "1")],
    )  # fmt: skip
    page = render(Report(title="t", lead="l", sections=[Section(title="Alerts", notes=[note])]))
    assert "var(--critical)" in page and "--critical:" in page
    assert all(f"&lt;{word}" in page for word in ("b<b", "here", "y", "do", "n"))
