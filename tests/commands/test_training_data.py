"""The batches of a run from one corpus and from a mixture."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from sparse_dataflow.commands import devices, train
from sparse_dataflow.commands.job import build
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.commands.training_data import corpus_of, thin_data, training_data
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.data import cache, held_out
from sparse_dataflow.data.answers import AnswerEvalBatches, AnswerRows
from sparse_dataflow.data.batches import TokenMixture, TrainBatches
from sparse_dataflow.data.chat import checked_example
from sparse_dataflow.data.corpora import corpus_of_texts, load_corpus
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.examples import encode
from sparse_dataflow.data.tokenizer import (
    Tokenizer,
    byte_tokenizer,
    id_tokenizer,
    train_tokenizer,
)
from sparse_dataflow.evaluation import run_files
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect
from sparse_dataflow.runs.families import FAMILIES
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    for name, letter in (("books", "a"), ("code", "b")):
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{number}.txt").write_text(letter * (2000 + number))
    return tmp_path


def data_of(corpus_name):
    config = preset("pico").change(data__corpus=corpus_name, training__batch=8).dense()
    corpus = load_corpus(corpus_name, cache.FOLDER)
    tokenizer = train_tokenizer(corpus, 300, cache.FOLDER)
    data = training_data(config, variants(config, 300)[0], corpus, tokenizer)
    decoded = [tokenizer.decode(row) for row in data.train[0].tokens]
    return data, decoded


def test_one_corpus_has_no_mixture(folder):
    data, decoded = data_of("books")
    assert data.mixture == () and set("".join(decoded)) == {"a"}


def test_held_out_text_of_which_all_tokens_are_unknown_is_refused(folder, monkeypatch):
    corpus = load_corpus("books", cache.FOLDER)
    tokenizer = train_tokenizer(corpus, 300, cache.FOLDER)
    monkeypatch.setattr(Tokenizer, "token_bytes", np.zeros(300, np.int32))
    config = preset("pico").change(data__corpus="books", training__batch=8).dense()
    with pytest.raises(UserError, match=r"no text for any held-out token of .*books.*legal: data"):
        training_data(config, variants(config, 300)[0], corpus, tokenizer)
    assert not list((cache.FOLDER / "tokens").glob("train-*"))  # Before the work.


def test_a_mixture_has_windows_by_weight_and_held_out_windows_of_each(folder):
    data, decoded = data_of("books:3,code:1")
    assert [set(text) for text in decoded].count({"a"}) == 6
    assert [(source.name, source.weight) for source in data.mixture] == [
        ("books", 0.75),
        ("code", 0.25),
    ]
    books, code = (source.validation[0].tokens for source in data.mixture)
    assert not np.array_equal(books, code)
    assert data.validation is data.mixture[0].validation


@pytest.mark.parametrize(
    ("size", "ends", "words"),
    [
        (400, [399], ""),
        (400, [7, 399, 20], ""),
        (512, [399], "id 511.*largest id here is 399.*model.vocab_size=400"),
        (300, [], "id 299.*largest id here is 260.*model.vocab_size=261"),
        (1000, [998, 998], "id 999.*largest id here is 998.*model.vocab_size=999"),
    ],
)
def test_ids_without_the_end_of_text_are_said(tmp_path, monkeypatch, capsys, size, ends, words):
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    pieces = [np.append(np.arange(200, 261), end) for end in ends] or [np.arange(200, 261)]
    (tmp_path / "ids").mkdir()
    for file, first in (("train.bin", []), ("val.bin", [199])):  # No copies of documents.
        rows = [np.append(first, piece) for piece in pieces * 20]
        np.concatenate(rows).astype(np.uint16).tofile(tmp_path / "ids" / file)
    name = str(tmp_path / "ids")
    config = preset("pico").change(
        data__corpus=name, data__tokenizer="none", model__vocab_size=size,
        training__sequence=16, training__batch=2,
    ).dense()  # fmt: skip
    corpus = load_corpus(name, cache.FOLDER)
    training_data(config, variants(config, size)[0], corpus, id_tokenizer(size))
    sentences = [line for line in capsys.readouterr().err.splitlines() if "end of text" in line]
    assert len(sentences) == bool(words) and re.search(words, "".join(sentences))


class _DataWanted(Exception):
    """The data of a run was asked for."""


@pytest.mark.parametrize("saved, rounded", [({}, True), ({"rounded_weights": False}, False)])
def test_a_run_keeps_how_its_mixture_is_drawn(folder, monkeypatch, saved, rounded):
    drawn_by = []

    def stop(*arguments):
        drawn_by.append(arguments[-1])
        raise _DataWanted

    monkeypatch.setattr(build, "training_data", stop)
    name = "books:0.3,code:0.7"
    out = folder / "run"
    config = preset("pico").change(
        data__corpus=name, model__vocab_size=300, sparsity__block=16, training__steps=9,
        run__out=str(out), run__twin=False,
    )  # fmt: skip
    with pytest.raises(_DataWanted):
        train.train(config)
    corpus = load_corpus(name, cache.FOLDER)
    tokenizer = train_tokenizer(corpus, 300, cache.FOLDER)
    record = RunRecord(
        "train", ("sd.train()",), "today", {}, "cpu", name, corpus.content_hash,
        tokenizer.content_hash, 300, {"sparse": 9},
    ).to_json()  # fmt: skip
    del record["rounded_weights"]  # As a run of an older version.
    out.mkdir()
    tokenizer.save(out / run_files.TOKENIZER)
    settled = settling.settled(config, detect.detect(["float32"]))
    for file, fields in ((run_files.RECORD, record | saved), (run_files.CONFIG, settled.to_json())):
        (out / file).write_bytes(run_files.to_bytes(fields))
    with pytest.raises(_DataWanted):
        train.train(config, resume=True)
    assert drawn_by == [False, rounded]


def test_a_run_of_an_older_version_says_that_it_held_out_other_documents():
    corpus = corpus_of_texts([f"text {number}" for number in range(40)])
    fields = ("train", ("sd.train()",), "today", {}, "cpu", "texts", "0" * 64, "t", 300, {})
    messages = {
        1: "older version of this package, which held out other documents of texts",
        held_out.VERSION: "texts has changed since run was started; put it back",
    }
    for version, words in messages.items():
        record = RunRecord(*fields, split_version=version)
        with pytest.raises(UserError, match=words):
            record.refuse_other_corpus(Path("run"), corpus, "; put it back")
    same = RunRecord(*fields[:6], corpus.content_hash, *fields[7:])
    same.refuse_other_corpus(Path("run"), corpus, "")


def test_packed_rows_have_the_losses_of_rows_of_one_example():
    fields = {**FAMILIES["llama"], "num_kv_heads": 2}
    model = ModelConfig(2, 32, 4, 64, vocab_size=257, max_len=64, **fields)
    params = gpt.init(model, jax.random.key(0))
    texts = [("1+1=", "2"), ("what is it?", "a test"), ("no", "yes"), ("a", "b")]
    lines = [checked_example({"prompt": prompt, "answer": answer}) for prompt, answer in texts]
    tokenizer = byte_tokenizer(257)
    examples = encode([Document(line, line) for line in lines], tokenizer)
    totals, counts = [], []
    for pack in (False, True):
        rows = AnswerRows.of(examples, 31, tokenizer.eot_id, pack)
        masked = dataclasses.replace(model, mask_documents=pack)
        loss = jax.jit(functools.partial(whole.loss, masked))
        batches = AnswerEvalBatches(rows, 2, 31)
        weights = weights_of(masked, params)
        totals.append(sum(float(loss(weights, batch)) for batch in batches))
        counts.append((len(rows), batches.total_tokens))
    np.testing.assert_allclose(totals[1], totals[0], rtol=1e-5)
    tokens = sum(len(answer) + 1 for _, answer in texts)
    assert counts == [(4, tokens), (2, tokens)]


@pytest.mark.parametrize(
    "parallelism", [{"parallel__executor": "relay"}, {"parallel__mesh": "stage:2"}]
)
@pytest.mark.parametrize(
    "change",
    [
        {"model__mask_documents": True},
        {"data__loss": "answers", "run__init_from": "DIR"},
        {"training__adapter_rank": 2, "run__init_from": "DIR"},
    ],
)
def test_stages_and_the_relay_read_the_context_of_a_batch(parallelism, change):
    config = preset("pico").change(**change, **parallelism, run__twin="no").dense()
    executor = devices.executor(config, described=0)
    devices.check(executor, config, variants(config))


@pytest.mark.parametrize(
    "steps, count, message",
    [
        (20, 10**7, ""),
        (10**6, 10**7, r"^sparse reads books 51 times over, as it has 10,000,000 training tokens"),
        (20, 10**4, r"^sparse has .* parameters and books 10,000 training tokens, which it can"),
        (19, 10**4, ""),  # It reads 9,728 of them, once.
        (1, 600, ""),
        (1, 500, r"^sparse has .* parameters and books 500 training tokens, which it can"),
    ],
)
def test_a_corpus_that_is_too_small_for_a_run_is_said(steps, count, message):
    corpus = Corpus("books", [], [], "hash")
    config = preset("pico").change(training__steps=steps, sparsity__block=16, run__twin=False)
    batches = TrainBatches(np.zeros(count, np.uint16), 4, 64)
    sentences = thin_data(corpus, batches, variants(config, 300))
    assert len(sentences) == bool(message) and re.search(message, "".join(sentences))


def test_a_source_of_a_mixture_that_is_read_too_often_is_said():
    books, code = (Corpus(name, [], [], "hash") for name in ("books", "code"))
    mixed = Corpus("mixed", [], [], "", (("books", books, 0.9), ("code", code, 0.1)))
    tokens = TokenMixture((np.zeros(10**7, np.uint16), np.zeros(10**5, np.uint16)), (0.9, 0.1))
    config = preset("pico").change(training__steps=10**5, sparsity__block=16, run__twin=False)
    models = variants(config, 300)
    (sentence,) = thin_data(mixed, TrainBatches(tokens, 4, 64), models)
    assert sentence.startswith("sparse reads code 51 times over")


def test_held_out_text_of_the_users_own_replaces_that_of_a_mixture(folder):
    (folder / "mine.txt").write_text("c" * 3000 + "\n")
    config = (
        preset("pico")
        .change(data__corpus="books:3,code:1", data__validation="mine.txt", training__batch=8)
        .dense()
    )
    loaded = corpus_of(config.data)
    data = training_data(config, variants(config, 300)[0], loaded, byte_tokenizer(300))
    assert data.mixture == ()
    assert set(data.validation[0].tokens.ravel()) <= {ord("c"), ord("\n"), 299, 0}
