import os

import numpy as np
import pytest

from sparse_dataflow.data import tokenizer as tokenizer_module
from sparse_dataflow.data import tokens as tokens_module
from sparse_dataflow.data.batches import TrainBatches
from sparse_dataflow.data.tokenizer import gpt2_tokenizer, train_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.files.errors import UserError


@pytest.fixture
def tokenizer(prose, tmp_path):
    return train_tokenizer(prose, 300, tmp_path)


def flat(documents, tokenizer):
    return np.concatenate(
        [np.append(tokenizer.encode(d.text), tokenizer.eot_id) for d in documents]
    )


@pytest.mark.parametrize("batch_characters", [1, 1000, 2**30])
@pytest.mark.parametrize("piece_characters", [10, 2**18])
def test_splits_are_their_documents_each_with_an_end(
    prose, tokenizer, tmp_path, monkeypatch, batch_characters, piece_characters
):
    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", batch_characters)
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARACTERS", piece_characters)
    made = prepare_tokens(prose, tokenizer, tmp_path)
    for split in ("train", "validation"):
        documents, stored = getattr(prose, split), getattr(made, split)
        np.testing.assert_array_equal(stored.tokens, flat(documents, tokenizer))
        assert stored.documents == len(documents)
        assert stored.text_bytes == sum(len(d.text.encode()) for d in documents)
        assert tokenizer.token_bytes[stored.tokens[:]].sum() == stored.text_bytes


def test_tokens_are_read_by_the_slice(prose, tokenizer, tmp_path, monkeypatch):
    tokens = prepare_tokens(prose, tokenizer, tmp_path).train.tokens
    assert tokens.dtype == np.uint16
    read, sizes = os.pread, []
    monkeypatch.setattr(os, "pread", lambda *of: sizes.append(of[1]) or read(*of))
    batch = TrainBatches(tokens, batch_size=3, sequence_length=5)[7]
    assert batch["tokens"].shape == (3, 6) and sizes == [12] * 3


def test_wide_vocabularies_get_wide_integers(prose, tmp_path, tokenizer):
    wide = type(tokenizer)(tokenizer.tokens, tokenizer.merges, vocab_size=70_000)
    stored = prepare_tokens(prose, wide, tmp_path).train.tokens
    assert stored.dtype == np.uint32
    assert stored[:].max() == 69_999
    assert prepare_tokens(prose, gpt2_tokenizer(), tmp_path).train.tokens.dtype == np.uint16


def refuse(*_):
    raise AssertionError("tokenised twice")


def test_a_second_opening_tokenises_nothing(prose, tokenizer, tmp_path, monkeypatch):
    first = prepare_tokens(prose, tokenizer, tmp_path)
    monkeypatch.setattr(tokens_module, "_make", refuse)
    second = prepare_tokens(prose, tokenizer, tmp_path)
    np.testing.assert_array_equal(first.train.tokens, second.train.tokens)
    with pytest.raises(AssertionError, match="tokenised twice"):
        prepare_tokens(prose, gpt2_tokenizer(), tmp_path)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name, damage",
    [
        ("train.npy", flip),
        ("train.npy", lambda path: path.write_bytes(path.read_bytes()[:-3])),
        ("train.npy", lambda path: path.write_bytes(b"")),
        ("train.npy", lambda path: path.unlink()),
        ("train.json", lambda path: path.unlink()),
        ("train.json", lambda path: path.write_text("{")),
        ("train.json", lambda path: path.write_text("[]")),
        ("train.json", lambda path: path.write_text(path.read_text().replace("abab", "abac"))),
    ],
)
def test_damaged_files_are_made_again(prose, tokenizer, tmp_path, name, damage):
    prepare_tokens(prose, tokenizer, tmp_path)
    (path,) = (tmp_path / "tokens").rglob(name)
    damage(path)
    again = prepare_tokens(prose, tokenizer, tmp_path)
    np.testing.assert_array_equal(again.train.tokens, flat(prose.train, tokenizer))


def test_a_failure_half_way_leaves_nothing(prose, tokenizer, tmp_path, monkeypatch):
    class Failing:
        def __iter__(self):
            yield prose.train[0]
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", 1)
    broken = type(prose)(prose.name, Failing(), prose.validation, prose.content_hash)
    with pytest.raises(UserError, match="No space left"):
        prepare_tokens(broken, tokenizer, tmp_path)
    assert not [path for path in (tmp_path / "tokens").rglob("*") if path.is_file()]
    assert len(prepare_tokens(prose, tokenizer, tmp_path).train.tokens) > 0
