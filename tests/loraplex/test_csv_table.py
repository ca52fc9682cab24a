"""Tables as CSV."""

import csv
import io

from loraplex.csv_table import FORMULA, Table, to_csv


def test_no_cell_is_a_formula():
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "plain", "a=b"]
    text = to_csv(Table(["x", "n"], [[text, -0.5] for text in texts]))
    heading, *rows = csv.reader(io.StringIO(text, newline=""))
    assert heading == ["x", "n"]
    assert [cells[0] for cells in rows] == [
        "'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\tx", "'\rx", "plain", "a=b",
    ]  # fmt: skip
    assert not any(cell.startswith(FORMULA) for cells in rows for cell in cells)


def test_what_is_not_known_is_an_empty_cell():
    [_, cells] = csv.reader(io.StringIO(to_csv(Table(["a", "b"], [[None, 0]]))))
    assert cells == ["", "0"]
