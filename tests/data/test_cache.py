import errno

import numpy as np
import pytest

from sparse_dataflow.data import cache
from sparse_dataflow.data.cache import exclusive
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.tokenizer import train_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError


def test_a_full_disk_raises_user_error(tmp_path):
    with pytest.raises(UserError, match="No space left"), exclusive(tmp_path, "key"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_other_errors_propagate(tmp_path):
    with pytest.raises(ConnectionError), exclusive(tmp_path, "key"):
        raise ConnectionError("no network")


def test_an_unwritable_cache_folder_raises_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), exclusive(tmp_path / "file", "key"):
        pass


def test_a_folder_of_others_is_no_cache(tmp_path):
    (tmp_path / "locks").mkdir()
    (tmp_path / "tokens").write_text("mine")
    with pytest.raises(UserError, match="may not replace"), exclusive(tmp_path, "key"):
        pass
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["locks", "tokens"]
    assert (tmp_path / "tokens").read_text() == "mine"


def test_a_cache_that_has_no_mark_yet_goes_on(tmp_path):
    for name in ("locks", "texts", "tokens"):
        (tmp_path / name).mkdir()
    for _ in range(2):
        with exclusive(tmp_path, "key"):
            pass
    assert (tmp_path / folders.MARK).exists()


def test_what_is_there_is_read_from_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 20)
    folder = tmp_path / ".cache"

    def read():
        corpus = load_corpus(str(tmp_path), folder)
        tokens = prepare_tokens(corpus, train_tokenizer(corpus, 300, folder), folder)
        return np.asarray(tokens.train.tokens).tolist()

    first = read()

    def refuse(*_):
        raise UserError("The data cache cannot be written.")

    monkeypatch.setattr(cache, "exclusive", refuse)
    assert read() == first
