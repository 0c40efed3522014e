import os
import subprocess
import sys

import numpy as np
import pytest

from sparse_dataflow.data import fetched
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
def test_splits_are_their_documents_with_end_of_text_tokens(
    prose, tokenizer, tmp_path, monkeypatch, batch_characters, piece_characters
):
    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", batch_characters)
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARACTERS", piece_characters)
    prepared = prepare_tokens(prose, tokenizer, tmp_path)
    for split in ("train", "validation"):
        documents, stored = getattr(prose, split), getattr(prepared, split)
        np.testing.assert_array_equal(stored.tokens, flat(documents, tokenizer))
        assert stored.documents == len(documents)
        assert stored.text_bytes == sum(len(d.text.encode()) for d in documents)
        assert tokenizer.token_bytes[stored.tokens[:]].sum() == stored.text_bytes


def test_tokens_are_read_slice_by_slice(prose, tokenizer, tmp_path, monkeypatch):
    tokens = prepare_tokens(prose, tokenizer, tmp_path).train.tokens
    assert tokens.dtype == np.uint16
    read, sizes = os.pread, []
    monkeypatch.setattr(os, "pread", lambda *args: sizes.append(args[1]) or read(*args))
    batch = TrainBatches(tokens, batch_size=3, sequence_length=5)[7]
    assert batch.tokens.shape == (3, 5) and sizes == [12] * 3


def test_large_vocabularies_use_uint32(prose, tmp_path, tokenizer):
    wide = type(tokenizer)(tokenizer.tokens, tokenizer.merges, vocab_size=70_000)
    stored = prepare_tokens(prose, wide, tmp_path).train.tokens
    assert stored.dtype == np.uint32
    assert stored[:].max() == 69_999
    assert prepare_tokens(prose, gpt2_tokenizer(), tmp_path).train.tokens.dtype == np.uint16


def fail(*_):
    raise AssertionError("tokenised twice")


def test_prepared_tokens_are_reused(prose, tokenizer, tmp_path, monkeypatch):
    first = prepare_tokens(prose, tokenizer, tmp_path)
    monkeypatch.setattr(tokens_module, "_write", fail)
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
        ("train-*.npy", flip),
        ("train-*.npy", lambda path: path.write_bytes(path.read_bytes()[:-3])),
        ("train-*.npy", lambda path: path.unlink()),
        ("train-*.record", lambda path: path.unlink()),
        ("train-*.record", lambda path: path.write_text("[]")),
    ],
)
def test_damaged_files_are_rewritten(prose, tokenizer, tmp_path, name, damage):
    prepare_tokens(prose, tokenizer, tmp_path)
    (path,) = (tmp_path / "tokens").rglob(name)
    damage(path)
    again = prepare_tokens(prose, tokenizer, tmp_path)
    np.testing.assert_array_equal(again.train.tokens, flat(prose.train, tokenizer))


def test_a_failed_write_leaves_no_files(prose, tokenizer, tmp_path, monkeypatch):
    class Failing(list):
        def __getitem__(self, index):
            if index:
                raise OSError(28, "No space left on device")
            return super().__getitem__(index)

    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", 1)
    broken = type(prose)(prose.name, Failing(prose.train), prose.validation, prose.content_hash)
    with pytest.raises(UserError, match="No space left"):
        prepare_tokens(broken, tokenizer, tmp_path)
    assert not [path for path in (tmp_path / "tokens").rglob("*") if path.is_file()]
    assert len(prepare_tokens(prose, tokenizer, tmp_path).train.tokens) > 0


PREPARE = """
import re, sys
from pathlib import Path
from sparse_dataflow.data import corpora, tokenizer, tokens
corpus = corpora.load_corpus(sys.argv[1], Path(sys.argv[2]))
tokens.prepare_tokens(corpus, tokenizer.gpt2_tokenizer(), Path(sys.argv[2]))
# Not getrusage, which counts the process before exec too.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 2**10)
"""


@pytest.mark.slow
def test_a_large_file_of_one_line_is_prepared_in_bounded_memory(tmp_path):
    """It took 118 bytes of memory a byte."""
    (tmp_path / "line.txt").write_text("some words of a text without end " * 500_000)
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, tmp_path / "line.txt", tmp_path / "cache"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 0.6e9


def interrupted(prose, tokenizer, tmp_path, monkeypatch, documents):
    """Tokenizes until the process is interrupted; returns what is on disk."""

    class Interrupted(list):
        def __getitem__(self, index):
            if index == documents:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", 1)
    monkeypatch.setattr(tokens_module, "_SAVED_BYTES", 1)
    train = Interrupted(prose.train)
    broken = type(prose)(prose.name, train, prose.validation, prose.content_hash)
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(broken, tokenizer, tmp_path)
    (partial,) = (tmp_path / "tokens").rglob(".train-*.npy.partial")
    return partial


@pytest.mark.parametrize("documents", [4, 39])
@pytest.mark.parametrize("damage", [None, flip, lambda path: path.write_bytes(b"")])
def test_an_interrupted_tokenization_continues(
    prose, tokenizer, tmp_path, monkeypatch, damage, documents
):
    partial = interrupted(prose, tokenizer, tmp_path, monkeypatch, documents)
    if damage:
        partial.write_bytes(partial.read_bytes()[: 128 + 40])
        damage(partial)
    expected = flat(prose.train, tokenizer)
    encode, encoded = type(tokenizer).encode_batch, []
    monkeypatch.setattr(
        type(tokenizer), "encode_batch", lambda self, t: encoded.extend(t) or encode(self, t)
    )
    prepared = prepare_tokens(prose, tokenizer, tmp_path)
    np.testing.assert_array_equal(prepared.train.tokens, expected)
    assert prepared.train.text_bytes == sum(len(d.text.encode()) for d in prose.train)
    # A damaged file is written from the beginning.
    assert (prose.train[0].text in encoded) == bool(damage)
    assert not list((tmp_path / "tokens").rglob(".*"))


def test_progress_is_logged_off_a_terminal(prose, tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fetched, "SECONDS", -1.0)
    prepare_tokens(prose, tokenizer, tmp_path)
    assert "tokenizing prose: 40 of 40 documents" in caplog.text
