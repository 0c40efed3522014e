"""Training, tuning and held-out documents of a corpus."""

import numpy as np
import pytest

from experiments.studies import holdout
from experiments.studies.holdout import three_splits
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.shards import Shard
from sparse_dataflow.data.streamed import Stream
from sparse_dataflow.files.errors import UserError


def corpus(train, validation):
    documents = [Document(f"{i}.txt", f"text {i}") for i in range(train + validation)]
    return Corpus("c", documents[:train], documents[train:], "hash")


def ids(documents):
    return [documents[i].id for i in range(len(documents))]


@pytest.mark.parametrize(("train", "validation"), [(300, 15), (50, holdout.LARGE_VALIDATION)])
def test_the_three_splits_are_disjoint_and_lose_nothing(train, validation):
    before = corpus(train, validation)
    after, tuning = holdout.three_splits(before)
    splits = [ids(after.train), ids(after.validation)[:tuning], ids(after.validation)[tuning:]]
    assert all(splits) and after.content_hash != before.content_hash
    assert sorted(name for split in splits for name in split) == sorted(
        ids(before.train) + ids(before.validation)
    )
    with pytest.raises(IndexError):
        after.validation[len(after.validation)]
    assert after.validation[-1].id == splits[2][-1]


def test_a_small_validation_split_is_for_tuning_and_training_documents_are_held_out():
    before = corpus(400, 20)
    after, tuning = holdout.three_splits(before)
    assert ids(after.validation)[:tuning] == ids(before.validation)
    share = (len(after.validation) - tuning) / 400
    assert share == pytest.approx(holdout.MOVED / 20, abs=0.06)
    positions = [int(name.removesuffix(".txt")) for name in ids(after.validation)[tuning:]]
    assert not np.all(np.diff(positions) > 0), "not in the order of the files"


def test_a_large_validation_split_is_cut_in_two_and_training_stays():
    before = corpus(30, 2 * holdout.LARGE_VALIDATION)
    after, tuning = holdout.three_splits(before)
    assert after.train is before.train and tuning == holdout.LARGE_VALIDATION


def test_too_few_documents_are_refused():
    with pytest.raises(UserError, match="too few for a held-out split"):
        holdout.three_splits(corpus(1, 1))


def test_a_stream_keeps_its_training_documents_and_halves_the_held_out_ones(tmp_path):
    stream = Stream("x", (Shard("a"),), "text", 1)
    documents = [Document(str(n), str(n)) for n in range(5)]
    corpus = Corpus("x", documents, documents, "hash", stream=stream)
    split, tuning = three_splits(corpus)
    assert split.stream is stream and split.train is documents and tuning == 3
    assert [document.text for document in split.validation] == ["0", "2", "4", "1", "3"]
    with pytest.raises(UserError, match="one document; legal: two or more"):
        three_splits(Corpus("x", documents, documents[:1], "hash", stream=stream))
    (tmp_path / "train.bin").write_bytes(bytes(4000))
    with pytest.raises(UserError, match="has token ids; legal"):
        three_splits(load_corpus(str(tmp_path / "train.bin"), tmp_path / "cache"))
