"""A checkpoint has the names, shapes and dtypes that it had before layouts were leaves."""

import json

import pytest
import saved_names


@pytest.fixture(scope="module")
def released():
    return json.loads(saved_names.RELEASED.read_text())


@pytest.mark.parametrize("case", saved_names.CASES)
def test_a_checkpoint_has_its_names(released, case):
    assert saved_names.names(case) == released[case]
