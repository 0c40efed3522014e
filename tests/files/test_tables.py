"""Tables as Markdown, aligned text and CSV."""

import csv

from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.files import output

CELLS = st.lists(
    st.lists(st.text("ab 1", min_size=1, max_size=9).map(str.strip), min_size=3, max_size=3),
    min_size=1,
)


def test_markdown_has_a_head_a_rule_and_the_rows():
    assert output.markdown(("name", "n"), [("a", 1)]) == "| name | n |\n|---|---|\n| a | 1 |"


@given(CELLS, st.integers(0, 3))
def test_aligned_columns_begin_or_end_at_one_place(lines, left):
    widths = [max(map(len, column)) for column in zip(*lines)]
    starts = [sum(widths[:n]) + 2 * n for n in range(3)]
    for line, text in zip(lines, output.aligned(lines, left).split("\n")):
        for number, (cell, start, width) in enumerate(zip(line, starts, widths)):
            place = text[start : start + width]
            padded = cell.ljust(width) if number < left else cell.rjust(width)
            assert place.ljust(width) == padded


def test_a_csv_reads_as_it_was_written(tmp_path):
    rows = [{"name": "a, b", "n": "1"}, {"name": 'say "no"', "n": "2"}]
    output.write_csv(tmp_path / "rows.csv", rows)
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == rows
