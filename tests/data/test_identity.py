"""A name in the cache holds every setting that decides the ids of a run.

The settings are those of `DataConfig`, each of which is changed in turn.  What is read with a cache
that other settings filled must be what is read with an empty one.
"""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparse_dataflow.commands.training_data import corpus_of, tokenizer_of
from sparse_dataflow.data import cache
from sparse_dataflow.data.documents import Document, documents_digest, identity
from sparse_dataflow.data.local_files import LocalSource
from sparse_dataflow.data.tokenizer import Tokenizer, byte_tokenizer
from sparse_dataflow.data.tokenizer_library import Identity
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.files import derived
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import DataConfig, preset


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Returns corpora of each kind; the columns of one differ in a letter that is not ASCII."""
    root = tmp_path_factory.mktemp("corpora")
    for name in ("a", "b", "held out"):
        (root / name).mkdir()
        for number in range(40):
            (root / name / f"{number}.txt").write_text(f"text {number} of {name} " + "word " * 9)
    columns = ("text", "täxt", "tëxt", "prompt", "answer")
    rows = [{name: f"{name} {number} " * 9 for name in columns} for number in range(40)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = {name: [[n + k for k in range(9)] for n in range(99)] for n, name in enumerate("ij")}
    pq.write_table(pa.table({"input_ids": ids["i"], "tëxt": ids["j"]}), root / "ids.parquet")
    np.arange(256, dtype="<u2").repeat(9).tofile(root / "ids.bin")
    return root


def alternatives(root):
    """Returns the values of each setting of the data that its ids may depend on."""
    folders = f"{root / 'a'}:0.5,{root / 'b'}:0.5", f"{root / 'a'}:0.9,{root / 'b'}:0.1"
    files = ("a", "rows.jsonl", "ids.parquet", "ids.bin")
    return {
        "corpus": (*(str(root / name) for name in files), *folders),
        "column": ("", "täxt", "tëxt", "input_ids"),
        "validation": ("", str(root / "held out"), str(root / "ids.bin")),
        "tokenizer": ("bpe", "gpt2", "none"),
        "extend_vocabulary": (0,),  # Of a model; see tests/interchange/test_extended_vocabulary.py.
        "loss": ("all", "answers"),
    }


def configs(root, words):
    """Yields configs that differ in one setting from one of each corpus with one of some words."""
    values = alternatives(root)
    assert values.keys() == {field.name for field in dataclasses.fields(DataConfig)}
    for corpus in values["corpus"]:
        if not any(word in corpus for word in words):
            continue
        base = {"data__corpus": corpus, "data__tokenizer": "none" if "/ids." in corpus else "bpe"}
        base["model__vocab_size"] = 300
        yield preset("pico").change(**base)
        yield preset("pico").change(**{**base, "model__vocab_size": 310})
        for name in sorted(values.keys() - {"corpus"}):
            for value in values[name]:
                changes = {**base, f"data__{name}": value}
                if value == "answers":  # It trains given weights, which are not read here.
                    changes["run__init_from"] = "weights"
                config = preset("pico").change(**changes)
                if config != preset("pico").change(**base):
                    yield config


def read(config, folder, monkeypatch):
    """Returns all that training reads of the data, or the sentence of a refusal."""
    monkeypatch.setattr(cache, "FOLDER", folder)
    try:
        corpus = corpus_of(config.data)
        tokenizer = tokenizer_of(config, corpus)
        tokens = prepare_tokens(corpus, tokenizer, folder)
    except UserError as error:
        return str(error)
    splits = (tokens.train, tokens.validation)
    ids = [np.asarray(split.tokens).tolist() for split in splits]
    return tokenizer.content_hash, ids, [(split.documents, split.text_bytes) for split in splits]


@pytest.mark.parametrize("words", [("/a",), ("rows",), ("ids",)])
def test_what_is_read_does_not_depend_on_what_the_cache_has(corpora, tmp_path, monkeypatch, words):
    every = list(configs(corpora, words))
    cold = [read(config, tmp_path / f"cold{n}", monkeypatch) for n, config in enumerate(every)]
    warm = [read(config, tmp_path / "warm", monkeypatch) for config in every]
    for config, *seen in zip(every, cold, warm, strict=True):
        assert seen[0] == seen[1], config.data
    results = {repr(seen) for seen in cold if not isinstance(seen, str)}
    assert len(results) > 2


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LocalSource)])
def test_each_field_of_a_source_is_a_part_of_its_key(field, tmp_path):
    values = {"path": tmp_path, "examples": True, "column": "ä"}
    source = LocalSource(tmp_path / "a")
    changed = dataclasses.replace(source, **{field: values[field]})
    assert derived.key(changed) != derived.key(source)


_CHANGES = {
    "tokens": tuple("abc"),
    "merges": (("a", "b"),),
    "vocab_size": 999,
    "original": "{}",
    "original_ids": tuple(range(300)),
    "chat_template": {"text": "{{ messages }}"},
    "identity": Identity(ends=(7,)),
    "has_text": False,
}
_NO_IDS = {"has_text"}
"""Fields on which no id depends."""


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Tokenizer)])
def test_each_field_of_a_tokenizer_is_a_part_of_its_hash(field):
    tokenizer = byte_tokenizer(300)
    changed = byte_tokenizer(300)
    object.__setattr__(changed, field, _CHANGES[field])
    if field == "chat_template":
        object.__setattr__(changed, field, _template())
    if field == "original_ids":
        object.__setattr__(changed, "original", "x")
    assert (changed.content_hash == tokenizer.content_hash) == (field in _NO_IDS)


def _template():
    from sparse_dataflow.data.chat import ChatTemplate

    return ChatTemplate("{{ messages }}", ())


def test_sequences_of_documents_are_identified_by_their_text():
    documents = [Document(f"{n}", f"text {n}") for n in range(5)]
    assert identity(documents) == documents_digest(documents)
    assert identity(documents) != identity(documents[::-1])
    assert identity(documents) != identity([Document("0", "other"), *documents[1:]])
