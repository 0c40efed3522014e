"""The page of real models shows what its result files say."""

from pathlib import Path

import pytest

from tests.real import results

PAGE = (Path(__file__).parents[1] / "docs/guide/real_models.md").read_text("utf-8")
FILES = sorted(results.FOLDER.glob("*.json"))


def test_there_are_results():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_table_of_a_file_is_on_the_page(path):
    result = results.load(path)
    table = results.speed_table if path.stem.startswith("speed_") else results.table
    assert table(result) in PAGE
