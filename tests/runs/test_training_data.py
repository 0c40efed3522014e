"""The batches of a run from one corpus and from a mixture."""

import numpy as np
import pytest

from sparse_dataflow.config.presets import preset
from sparse_dataflow.data import cache
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.tokenizer import train_tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs import devices
from sparse_dataflow.runs.training_data import training_data
from sparse_dataflow.training.variants import variants


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    for name, letter in (("books", "a"), ("code", "b")):
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{number}.txt").write_text(letter * 2000)
    return tmp_path


def data_of(corpus_name):
    config = preset("pico").change(data__corpus=corpus_name, training__batch=8).dense()
    corpus = load_corpus(corpus_name, cache.FOLDER)
    tokenizer = train_tokenizer(corpus, 300, cache.FOLDER)
    data = training_data(config, variants(config, 300)[0], corpus, tokenizer)
    decoded = [tokenizer.decode(row) for row in data.train[0]["tokens"]]
    return data, decoded


def test_one_corpus_has_no_mixture(folder):
    data, decoded = data_of("books")
    assert data.mixture == () and set("".join(decoded)) == {"a"}


def test_a_mixture_has_windows_by_weight_and_held_out_windows_of_each(folder):
    data, decoded = data_of("books:3,code:1")
    assert [set(text) for text in decoded].count({"a"}) == 6
    assert [(source.name, source.weight) for source in data.mixture] == [
        ("books", 0.75),
        ("code", 0.25),
    ]
    books, code = (source.validation[0]["tokens"] for source in data.mixture)
    assert not np.array_equal(books, code)
    assert data.validation is data.mixture[0].validation


@pytest.mark.parametrize("change", [{"parallel__executor": "relay"}, {"parallel__mesh": "stage:2"}])
def test_executors_whose_blocks_do_not_see_tokens_refuse_masked_documents(change):
    config = preset("pico").change(model__mask_documents=True, **change).dense()
    executor = devices.executor(config, describing=True)
    with pytest.raises(UserError, match=r"model\.mask_documents=yes with .*; legal:"):
        devices.check(executor, config, variants(config), None)
