"""The page of real models shows what its result files say."""

import re

import pytest
from places import ROOT

from tests.real import results

PAGE = (ROOT / "docs/evidence/real_models.md").read_text("utf-8")
GUIDE = (ROOT / "docs/guide/real_models.md").read_text("utf-8")
FILES = sorted(results.FOLDER.glob("*.json"))


def test_there_are_results():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_row_of_a_file_is_on_the_page(path):
    for line in results.table(results.load(path)).splitlines():
        assert line in PAGE, "run python tests/real/table.py --write"


def test_the_tables_of_the_page_are_written_by_the_script():
    assert results.page() == PAGE, "run python tests/real/table.py --write"


def test_rows_of_the_guide_are_rows_of_the_page():
    rows = re.findall(r"^\| (.*?) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE, re.M)
    assert len(rows) > 2
    for label, *figures in rows:
        matches = [
            line
            for line in PAGE.splitlines()
            if line.startswith((f"| {label} |", f"| {label.split(',')[0]} |"))
        ]
        assert any(f"| {' | '.join(figures)} |" in line for line in matches), label
