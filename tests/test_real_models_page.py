"""The page of real models shows what its result files say."""

import pytest
from places import ROOT

from tests.real import results

PAGE = (ROOT / "docs/guide/real_models.md").read_text("utf-8")
FILES = sorted(results.FOLDER.glob("*.json"))


def test_there_are_results():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_table_of_a_file_is_on_the_page(path):
    result = results.load(path)
    table = results.speed_table if path.stem.startswith("speed_") else results.table
    assert table(result) in PAGE
