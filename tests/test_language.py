"""At most one name in a hundred is vague; `python tests/names.py PLACE --list` lists them."""

import names
import pytest

LARGEST_SHARE = 0.01


@pytest.mark.parametrize("place", ["sparse_dataflow", "experiments", "launch", "tests"])
def test_few_names_are_vague(place):
    total, matches = names.survey(place)
    assert len(matches) <= LARGEST_SHARE * total, matches[:20]
    hidden = [match for match in matches if names.hides_its_noun(match[0])]
    assert not hidden, hidden


@pytest.mark.parametrize(
    "name", ["found", "_kept", "step_told", "PARTS", "what_is", "OneDevice", "of_layer", "_of_run"]
)
def test_a_vague_word_is_found_in_any_spelling(name):
    assert names.vague(name)


@pytest.mark.parametrize(
    "name", ["partition", "held_out", "apart", "test_what_is_told", "keep", "of", "weights_of"]
)
def test_other_words_are_legal(name):
    assert not names.vague(name)
