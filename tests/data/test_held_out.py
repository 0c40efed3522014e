"""Which side a document is on follows from its text, and held-out text is trained from nowhere."""

import dataclasses
import hashlib
import json
import re

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sparse_dataflow.data import cache, held_out
from sparse_dataflow.data.corpora import corpus_of_texts, load_corpus
from sparse_dataflow.data.corpus import mixtures
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.held_out import Sides, cut_in_two, digest, holds_out
from sparse_dataflow.data.shards import Skipped
from sparse_dataflow.data.streamed import SampleDocuments, streamed_corpus, with_text
from sparse_dataflow.data.tokenizer import byte_tokenizer, id_tokenizer
from sparse_dataflow.data.tokens import split_tokens
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.tokenizer_files import plain_text

texts = st.lists(st.text(st.sampled_from("abcdefgh"), min_size=1, max_size=3), min_size=2)


def sides(strings):
    """Returns the texts of both splits."""
    corpus = corpus_of_texts(strings)
    return [[document.text for document in split] for split in (corpus.train, corpus.validation)]


@given(st.text("abc \n", max_size=20))
def test_the_rule_is_the_documented_one(text):
    first = hashlib.sha256(" ".join(text.split()).encode()).digest()[:8]
    assert digest(text) == int.from_bytes(first, "big")
    many = np.array([digest(f"{text} {number}") for number in range(400)], np.uint64)
    assert holds_out(many).tolist() == (many % np.uint64(20) == 0).tolist()


@pytest.mark.parametrize(
    "copy",
    ["caf\u00e9  said:\r\nno\r\n", "\ufeffcaf\u00e9 said:\nno", "cafe\u0301 said:\nno \t\n\n"],
)
def test_copies_with_other_white_space_or_composition_have_one_digest(copy):
    assert digest(copy) == digest("caf\u00e9 said:\nno") != digest("caf\u00e9 said:\nNo")


def test_about_one_in_twenty_texts_is_held_out_whatever_their_copies():
    train, validation = sides([f"text {number % 4000}" for number in range(20_000)])
    assert 150 < len(set(validation)) < 250 and not set(validation) & set(train)


@example(["a", "a", "b"])
@given(texts)
def test_every_text_is_on_one_side_and_no_side_is_empty(strings):
    assume(len({digest(text) for text in strings}) > 1)
    train, validation = sides(strings)
    assert sorted(train + validation) == sorted(strings)
    assert train and validation and not {*map(digest, train)} & {*map(digest, validation)}


@given(texts, st.randoms())
def test_the_sides_do_not_depend_on_order(strings, random):
    assume(len({digest(text) for text in strings}) > 1)
    shuffled = random.sample(strings, len(strings))
    assert set(sides(strings)[1]) == set(sides(shuffled)[1])


def test_neither_other_documents_nor_place_nor_column_change_the_side(tmp_path):
    few, more = ([f"text {n}" for n in range(count)] for count in (200, 400))
    validation = set(sides(more)[1])
    assert set(sides(few)[1]) == validation & set(few)
    (tmp_path / "a").mkdir()
    for number, text in enumerate(few):
        (tmp_path / "a" / f"{number}.txt").write_text(text + "\r\n" * (number % 3))
    rows = [json.dumps({"title": text, "text": f"other {text}"}) for text in reversed(few)]
    (tmp_path / "b.jsonl").write_text("\n".join(rows))
    for name, column in ((tmp_path / "a", ""), (tmp_path / "b.jsonl", "title")):
        corpus = load_corpus(str(name), tmp_path / "cache", column=column)
        assert {d.text.strip() for d in corpus.validation} == validation & set(few)


def test_a_corpus_of_one_text_is_cut_however_often_it_has_it():
    text = "".join(f"line {n}\n" for n in range(100))
    for count in (1, 3):
        [train], [validation] = sides([text] * count)
        assert train + validation == text


def test_near_copies_are_counted(caplog):
    corpus_of_texts([f"Text, number {i}!" for i in range(200)])
    assert "differ from a training document" not in caplog.text
    corpus_of_texts([f"{t} {i}" for i in range(200) for t in ("Text", "text!")])
    assert "held-out documents differ from a training document in case" in caplog.text


@given(st.text(st.characters(codec="utf-8"), min_size=2, max_size=400))
def test_a_single_document_is_cut_without_loss(text):
    train, validation = (piece.text for piece in cut_in_two(Document("only", text)))
    assert train + validation == text
    assert train and validation
    limit = int(0.95 * len(text.encode()))
    assert len(train.encode()) <= limit
    if "\n" in text.encode()[:limit].decode(errors="ignore"):
        assert train.endswith("\n")
        assert "\n" not in text.encode()[len(train.encode()) : limit].decode(errors="ignore")


def test_a_text_that_is_too_short_to_cut_is_refused():
    with pytest.raises(UserError, match="too short"):
        cut_in_two(Document("one", "x"))


def test_examples_have_the_digest_of_their_messages():
    pair = json.dumps({"prompt": "2+2?", "answer": "4 \n"})
    messages = [{"role": r, "content": c} for r, c in (("user", "2+2?"), ("assistant", "4"))]
    ours, theirs = map(held_out.digest_of_example, (pair, json.dumps({"messages": messages})))
    assert ours == theirs == digest("2+2? 4")


# Every way in which held-out text may come back as training text.


def write(folder, texts):
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text.encode())
    return folder


TRAIN = [f"document {n} of its own" for n in range(60)]
VALIDATION = [f"held-out text {n}" for n in range(5)]


def trained(corpus):
    return {digest(document.text) for document in corpus.train}


@pytest.mark.parametrize("place", ["a folder inside", "another folder", "one file inside"])
def test_text_of_data_validation_is_left_out_wherever_it_is(place, tmp_path, caplog):
    folder = write(tmp_path / "data", TRAIN)
    copies = [text.replace(" ", "  ") + "\r\n" for text in VALIDATION]
    inside = write(folder / "val", copies)
    name = {"a folder inside": inside, "one file inside": inside / "000.txt"}.get(place)
    name = name or write(tmp_path / "val", VALIDATION)
    corpus = load_corpus(str(folder), tmp_path / "cache", validation=str(name))
    validation = {digest(document.text) for document in corpus.validation}
    assert len(validation) == (1 if place == "one file inside" else 5)
    assert not trained(corpus) & validation and len(corpus.train) == 65 - len(validation)
    assert f"{len(validation)} of 65 documents" in caplog.text and "held out" in caplog.text


def test_a_mixture_trains_no_text_that_one_of_its_corpora_holds_out(tmp_path, caplog):
    shared = [f"shared article {n}" for n in range(150)]
    first = write(tmp_path / "one", shared + TRAIN)
    # The rule holds out none of these seven, so the one with the smallest digest is held out.
    few = [text + "\n" for text in shared if digest(text) % 20][:7]
    other = write(tmp_path / "other", few)
    corpus = load_corpus(f"{first}:0.5,{other}:0.5", tmp_path / "cache")
    validation = {digest(document.text) for document in corpus.validation}
    assert not trained(corpus) & validation and "held out" in caplog.text
    alone = load_corpus(str(first), tmp_path / "cache")
    assert alone.content_hash != corpus.mixture[0][1].content_hash


def test_one_part_of_a_mixture_may_not_be_the_held_out_text(tmp_path):
    train, validation = write(tmp_path / "own", TRAIN), write(tmp_path / "held", VALIDATION)
    with pytest.raises(UserError, match=r"held: all of its 5 documents are held out"):
        load_corpus(f"{train}:0.5,{validation}:0.5", tmp_path / "cache", validation=str(validation))
    with pytest.raises(UserError, match=r"held: all of its 5 documents are held out"):
        load_corpus(str(validation), tmp_path / "cache", validation=str(validation))


def test_a_document_that_is_cut_is_held_out_as_a_whole_elsewhere(tmp_path):
    long = "".join(f"line {n}\n" for n in range(200))
    single, folder = write(tmp_path / "single", [long]), write(tmp_path / "folder", [*TRAIN, long])
    corpus = load_corpus(f"{single}:0.5,{folder}:0.5", tmp_path / "cache")
    tail = corpus.mixture[0][1].validation[0].text
    assert not any(tail in document.text for document in corpus.train)
    whole = load_corpus(str(folder), tmp_path / "cache", validation=str(single / "000.txt"))
    assert not any(tail in document.text for document in whole.train)
    assert [document.text for document in whole.validation] == [long]


def test_texts_of_python_are_trained_beside_named_held_out_text(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    validation = write(tmp_path / "held", VALIDATION)
    corpus = corpus_of_texts([*TRAIN, VALIDATION[2] + " "], validation=str(validation))
    assert {document.text for document in corpus.train} == set(TRAIN)
    assert {document.text for document in corpus.validation} == set(VALIDATION)
    assert corpus.own_validation


def test_examples_that_are_held_out_are_trained_in_no_form(tmp_path):
    pairs = [{"prompt": f"{n}+{n}?", "answer": f"{2 * n}"} for n in range(60)]
    forms = [
        {"messages": [{"role": "user", "content": pair["prompt"]},
                      {"role": "assistant", "content": pair["answer"] + "\n"}]}
        for pair in pairs[:9]
    ]  # fmt: skip
    for name, rows in (("train", pairs), ("held", forms)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = [str(tmp_path / f"{name}.jsonl") for name in ("train", "held")]
    corpus = load_corpus(names[0], tmp_path / "cache", examples=True, validation=names[1])
    assert len(corpus.train) == 51 and len(corpus.validation) == 9


@pytest.mark.parametrize("shipped", ["validation", "test"])
def test_a_stream_leaves_out_rows_with_held_out_text(shipped, tmp_path, caplog):
    for name, rows in (
        ("train", [*TRAIN, *(text + "\n" for text in VALIDATION)]),
        ("held", VALIDATION),
    ):
        lines = [json.dumps({"text": text}) for text in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = {"train": [str(tmp_path / "train.jsonl")], shipped: [str(tmp_path / "held.jsonl")]}
    stream, skipped = streamed_corpus("x", files).stream, Skipped()
    [shard] = stream.shards
    assert [text for _, text in stream.texts(shard, 0, skipped)] == TRAIN
    assert "5 rows of held-out text (first: " in skipped.words()
    assert {d.text for d in SampleDocuments(stream)} == set(TRAIN)
    # The first rows are held out where no split is; a copy comes later.
    lone = streamed_corpus("x", {"train": files["train"]})
    validation = {digest(document.text) for document in lone.validation}
    assert validation and not validation & {
        digest(t) for _, t in lone.stream.texts(shard, 0, skipped)
    }


def test_files_of_both_splits_of_a_stream_are_held_out(tmp_path, caplog):
    for name, rows in (("a", TRAIN), ("b", VALIDATION)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in rows))
    a, b = (str(tmp_path / f"{name}.jsonl") for name in "ab")
    stream = streamed_corpus("x", {"train": [a, b], "test": [b]}).stream
    assert [shard.address for shard in stream.shards] == [a]
    assert re.search("held out, as 'train' and 'test' have them: .*b.jsonl$", caplog.text, re.M)
    with pytest.raises(UserError, match="the same files in its splits 'train' and 'test'"):
        streamed_corpus("x", {"train": [b], "test": [b]})


def test_shards_without_text_to_train_are_named(tmp_path, caplog):
    for name, rows in (("a", TRAIN), ("b", VALIDATION)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in rows))
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    stream = streamed_corpus("x", {"train": files}, whole=True).stream
    digests = np.sort(np.array([digest(text) for text in VALIDATION], np.uint64))
    stream = with_text(dataclasses.replace(stream, held_out=digests))
    assert {shard.address for shard in stream.shards} == {files[0]}
    assert re.search("left out, as they have no text to train: [^,]*b.jsonl$", caplog.text, re.M)


def test_a_stream_in_a_mixture_leaves_out_what_the_others_hold_out(tmp_path):
    stored = load_corpus(str(write(tmp_path / "stored", TRAIN)), tmp_path / "cache")
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TRAIN))
    streamed = streamed_corpus("x", {"train": [str(tmp_path / "train.jsonl")]}, whole=True)
    sides = Sides(held_out=streamed.stream.held_out)
    corpus = Corpus("x", [], [], "hash", stream=streamed.stream, sides=sides)
    mixed = mixtures.mixed("m", {"s": stored, "x": corpus}, {"s": 0.5, "x": 0.5})
    stream = mixed.mixture[1][1].stream
    rows = [text for _, text in stream.texts(stream.shards[0], 0, Skipped())]
    validation = {document.text for document in stored.validation}
    assert validation and not validation & set(rows) and len(rows) == len(TRAIN) - len(validation)
    assert mixed.mixture[1][1].content_hash != "hash"
    every_digest = np.sort(np.array([digest(text) for text in TRAIN], np.uint64))
    every = Corpus("s", [], [], "s", sides=Sides(held_out=every_digest))
    with pytest.raises(UserError, match=r"^x: the documents .* are held out, so it has no"):
        mixtures.mixed("m", {"s": every, "x": corpus}, {"s": 0.5, "x": 0.5})


def ids_of(documents, end=0):
    return np.concatenate([[*document, end] for document in documents]).astype("<u2")


def test_ids_of_held_out_documents_are_left_out(tmp_path, caplog):
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 200, size).tolist() for size in rng.integers(1, 90, 60)]
    validation = documents[::7]
    (tmp_path / "ids").mkdir()
    ids_of(documents).tofile(tmp_path / "ids" / "train.bin")
    ids_of(validation[:-1]).tofile(tmp_path / "ids" / "val.bin")
    corpus = load_corpus(str(tmp_path / "ids"), tmp_path / "cache")
    tokenizer = dataclasses.replace(  # Its end of text is 0.
        byte_tokenizer(257), original=plain_text(byte_tokenizer(257)),
        original_ids=(*range(1, 257), 0),
    )  # fmt: skip
    for _ in range(2):
        train = split_tokens(corpus, "train", tokenizer, tmp_path / "cache")
        ids = np.array(tokenizer.original_ids)[train.tokens[:]]
        remaining = [d for d in documents if d not in validation[:-1]]
        assert ids.tolist() == ids_of(remaining).tolist() and train.documents == len(remaining)
        assert train.tokens[7:300].tolist() == train.tokens[:][7:300].tolist()
    assert f"{60 - len(remaining)} documents of training are held out" in caplog.text


def test_ids_without_ends_say_that_copies_are_not_looked_for(tmp_path, caplog):
    (tmp_path / "ids").mkdir()
    for name in ("train", "val"):
        np.arange(1, 200, dtype="<u2").tofile(tmp_path / "ids" / f"{name}.bin")
    corpus = load_corpus(str(tmp_path / "ids"), tmp_path / "cache")
    assert len(split_tokens(corpus, "train", byte_tokenizer(300), tmp_path / "cache").tokens) == 199
    assert "they cannot be told apart, and copies" in caplog.text


def test_ids_of_an_unknown_tokenizer_are_read_whole_with_a_note(tmp_path, caplog):
    (tmp_path / "ids").mkdir()
    ids = np.arange(3000, dtype="<u2") % 4
    ids.tofile(tmp_path / "ids" / "train.bin")
    ids[:400].tofile(tmp_path / "ids" / "val.bin")
    corpus = load_corpus(str(tmp_path / "ids"), tmp_path / "cache")
    train = split_tokens(corpus, "train", id_tokenizer(4), tmp_path / "cache")
    assert train.tokens[:].tolist() == ids.tolist()
    assert "which id ends a document is not known" in caplog.text
