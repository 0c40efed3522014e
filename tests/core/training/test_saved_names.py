"""A checkpoint has the names, shapes and dtypes that it had before layouts were leaves."""

import json

import pytest
import saved_names


@pytest.fixture(scope="module")
def kept():
    return json.loads(saved_names.KEPT.read_text())


@pytest.mark.parametrize("case", saved_names.CASES)
def test_a_checkpoint_has_its_names(kept, case):
    assert saved_names.names(case) == kept[case]
