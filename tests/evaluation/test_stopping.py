"""Streamed text is the decoded text of all tokens, up to the first stop string."""

import pytest
from decoded import BYTES
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.data.tokenizer import gpt2_tokenizer
from sparse_dataflow.evaluation.stopping import StreamDecoder

texts = st.text(st.characters(codec="utf-8"), max_size=30)
short = st.text("ab🙂 ", max_size=30)


def decode(tokenizer, tokens, stop=()):
    """Returns (released pieces, decoder)."""
    decoder = StreamDecoder(tokenizer, stop)
    pieces = [decoder.add(token) for token in tokens]
    return [*pieces, decoder.end("length")], decoder


@given(texts)
@pytest.mark.parametrize("tokenizer", [BYTES, gpt2_tokenizer()], ids=["bytes", "gpt2"])
def test_pieces_concatenate_to_the_text(tokenizer, text):
    tokens = tokenizer.encode(text).tolist()
    pieces, decoder = decode(tokenizer, tokens)
    assert "".join(pieces) == decoder.text == text
    assert decoder.tokens == tokens and decoder.stopped_by == "length"


def test_a_character_is_released_when_complete():
    pieces, _ = decode(BYTES, BYTES.encode("é🙂").tolist())
    assert pieces == ["", "é", "", "", "", "🙂", ""]


def test_an_incomplete_character_is_replaced():
    pieces, decoder = decode(BYTES, BYTES.encode("a🙂").tolist()[:-1])
    assert pieces[-1] == "\N{REPLACEMENT CHARACTER}" and decoder.text == "a" + pieces[-1]


@given(text=short, stop=st.lists(st.text("ab🙂 ", min_size=1, max_size=4), max_size=3))
@pytest.mark.parametrize("tokenizer", [BYTES, gpt2_tokenizer()], ids=["bytes", "gpt2"])
def test_text_ends_at_the_first_stop_string(tokenizer, text, stop):
    pieces, decoder = decode(tokenizer, tokenizer.encode(text).tolist(), stop)
    matches = [index for index in map(text.find, stop) if index >= 0]
    assert "".join(pieces) == decoder.text
    if matches:
        # Where two stop strings overlap, a token may complete the later one first.
        assert text.startswith(decoder.text) and decoder.stopped_by == "stop"
        assert not any(s in decoder.text for s in stop)
        rest = text[len(decoder.text) :]
        assert any(rest.startswith(s) for s in stop)
    else:
        assert decoder.text == text and decoder.stopped_by == "length"


def test_a_possible_stop_string_is_withheld():
    pieces, decoder = decode(BYTES, BYTES.encode("xENxEND.").tolist(), ["END"])
    assert pieces == ["x", "", "", "ENx", "", "", "", "", ""]
    assert decoder.text == "xENx" and len(decoder.tokens) == 7


def test_the_end_of_text_token_ends_the_text():
    pieces, decoder = decode(BYTES, [*BYTES.encode("ab"), BYTES.eot_id, *BYTES.encode("c")], ["bc"])
    assert "".join(pieces) == decoder.text == "ab"
    assert decoder.stopped_by == "end" and len(decoder.tokens) == 2
