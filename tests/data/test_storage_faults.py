"""Transient storage errors while data is prepared or read do not change the data."""

import errno
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_faults import failing

from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.tokenizer import train_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.0,) * 5)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name in "abcdefgh":
        (folder / f"{name}.txt").write_text(f"{name} lorem ipsum dolor sit amet\n" * 40)
    return folder


def prepared(text, cache):
    """Returns all data that training reads of a corpus."""
    corpus = load_corpus(str(text), cache)
    tokenizer = train_tokenizer(corpus, 300, cache)
    splits = prepare_tokens(corpus, tokenizer, cache)
    tokens = [np.asarray(split.tokens).tolist() for split in (splits.train, splits.validation)]
    return corpus.content_hash, tokenizer.content_hash, tokens


@pytest.fixture(scope="module")
def reference(text, tmp_path_factory):
    """(prepared cache, its data)."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, prepared(text, cache)


@settings(max_examples=25)
@given(
    first=st.integers(0, 60),
    times=st.integers(1, 5),
    number=st.sampled_from(sorted(storage.TRANSIENT)),
    new=st.booleans(),
)
def test_transient_errors_are_retried(text, reference, tmp_path_factory, first, times, number, new):
    cache = tmp_path_factory.mktemp("cache")
    if not new:
        cache = shutil.copytree(reference[0], cache / "copy")
    with failing(cache, first, times, number) as failed:
        assert prepared(text, cache) == reference[1]
    partial = [path for path in cache.rglob("*") if path.name.endswith((".partial", ".new"))]
    assert not partial, failed


@settings(max_examples=10)
@given(first=st.integers(0, 40), times=st.integers(1, 5))
def test_transient_errors_of_the_source_are_retried(
    text, reference, tmp_path_factory, first, times
):
    with failing(text, first, times, errno.ESTALE):
        assert prepared(text, tmp_path_factory.mktemp("cache")) == reference[1]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_permanent_errors_raise_user_error(text, tmp_path, number):
    with failing(tmp_path / "cache", 0, 10**6, number) as failed, pytest.raises(UserError):
        prepared(text, tmp_path / "cache")
    assert failed
