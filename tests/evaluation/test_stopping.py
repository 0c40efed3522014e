"""Text as it streams is the text of all tokens, up to the first stop string."""

import pytest
from decoded import BYTES
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.data.tokenizer import gpt2_tokenizer
from sparse_dataflow.evaluation.stopping import Writer

texts = st.text(st.characters(codec="utf-8"), max_size=30)
short = st.text("ab🙂 ", max_size=30)


def write(tokenizer, tokens, stop=()):
    """(pieces as they came, the writer)."""
    writer = Writer(tokenizer, stop)
    pieces = [writer.add(token) for token in tokens]
    return [*pieces, writer.end("length")], writer


@given(texts)
@pytest.mark.parametrize("tokenizer", [BYTES, gpt2_tokenizer()], ids=["bytes", "gpt2"])
def test_pieces_add_up_to_the_text(tokenizer, text):
    tokens = tokenizer.encode(text).tolist()
    pieces, writer = write(tokenizer, tokens)
    assert "".join(pieces) == writer.text == text
    assert writer.tokens == tokens and writer.stopped_by == "length"


def test_a_character_comes_when_it_is_whole():
    pieces, _ = write(BYTES, BYTES.encode("é🙂").tolist())
    assert pieces == ["", "é", "", "", "", "🙂", ""]


def test_a_character_never_completed_is_replaced():
    pieces, writer = write(BYTES, BYTES.encode("a🙂").tolist()[:-1])
    assert pieces[-1] == "\N{REPLACEMENT CHARACTER}" and writer.text == "a" + pieces[-1]


@given(text=short, stop=st.lists(st.text("ab🙂 ", min_size=1, max_size=4), max_size=3))
@pytest.mark.parametrize("tokenizer", [BYTES, gpt2_tokenizer()], ids=["bytes", "gpt2"])
def test_it_ends_at_the_first_stop_string(tokenizer, text, stop):
    pieces, writer = write(tokenizer, tokenizer.encode(text).tolist(), stop)
    places = [place for place in map(text.find, stop) if place >= 0]
    assert "".join(pieces) == writer.text
    if places:
        # Where two of them overlap, a token may complete the later one first.
        assert text.startswith(writer.text) and writer.stopped_by == "stop"
        assert not any(s in writer.text for s in stop)
        rest = text[len(writer.text) :]
        assert any(rest.startswith(s) for s in stop)
    else:
        assert writer.text == text and writer.stopped_by == "length"


def test_what_might_become_a_stop_string_is_held_back():
    pieces, writer = write(BYTES, BYTES.encode("xENxEND.").tolist(), ["END"])
    assert pieces == ["x", "", "", "ENx", "", "", "", "", ""]
    assert writer.text == "xENx" and len(writer.tokens) == 7


def test_the_end_of_text_ends_it_and_is_no_text():
    pieces, writer = write(BYTES, [*BYTES.encode("ab"), BYTES.eot_id, *BYTES.encode("c")], ["bc"])
    assert "".join(pieces) == writer.text == "ab"
    assert writer.stopped_by == "end" and len(writer.tokens) == 2
