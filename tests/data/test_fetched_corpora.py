"""Downloaded corpora, with fake downloads."""

import pytest
import tensorflow_datasets as tfds

from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.held_out import digest
from sparse_dataflow.files.errors import UserError


class _Prose(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.2.3")
    FEATURES = {"title": tfds.features.Text(), "text": tfds.features.Text()}  # noqa: RUF012
    SPLITS = {"train": 30, "validation": 4}  # noqa: RUF012

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(self.FEATURES)
        )

    def _split_generators(self, dl_manager):
        return {name: self._generate_examples(name, n) for name, n in self.SPLITS.items()}

    def _generate_examples(self, name, count):
        for i in range(count):
            yield i, {key: f"{key} {name} {i} ü" for key in self.FEATURES}


class TinyProse(_Prose):
    pass


class TinyProseWithTest(_Prose):
    SPLITS = {"train": 10, "test": 3}  # noqa: RUF012
    FEATURES = {"sentence": tfds.features.Text()}  # noqa: RUF012


class TinyProseTrainOnly(_Prose):
    SPLITS = {"train": 200}  # noqa: RUF012


class TinyProseTestOnly(_Prose):
    SPLITS = {"test": 5}  # noqa: RUF012


class TinyPairs(_Prose):
    FEATURES = {"question": tfds.features.Text(), "answer": tfds.features.Text()}  # noqa: RUF012


class TinyUnreachable(_Prose):
    def _split_generators(self, dl_manager):
        raise ConnectionError("no route to host")


def texts(documents):
    return sorted(document.text for document in documents)


def test_a_tfds_corpus_keeps_its_own_validation_split(tmp_path):
    corpus = load_corpus("tiny_prose", tmp_path)
    assert texts(corpus.train) == sorted(f"text train {i} ü" for i in range(30))
    assert texts(corpus.validation) == sorted(f"text validation {i} ü" for i in range(4))
    again = load_corpus("tiny_prose:1.2.3", tmp_path)
    assert (again.content_hash, texts(again.train)) == (corpus.content_hash, texts(corpus.train))


def test_a_tfds_corpus_without_validation_holds_out_its_test_split(tmp_path):
    corpus = load_corpus("tiny_prose_with_test", tmp_path)
    assert texts(corpus.train) == sorted(f"sentence train {i} ü" for i in range(10))
    assert texts(corpus.validation) == sorted(f"sentence test {i} ü" for i in range(3))
    assert corpus.content_hash != load_corpus("tiny_prose", tmp_path).content_hash


def test_a_tfds_corpus_with_only_a_train_split_is_split_by_the_hash_rule(tmp_path):
    corpus = load_corpus("tiny_prose_train_only", tmp_path)
    assert texts([*corpus.train, *corpus.validation]) == sorted(
        f"text train {i} ü" for i in range(200)
    )
    assert len(corpus.validation) > 0
    assert all(digest(document.text) % 20 == 0 for document in corpus.validation)
    assert not any(digest(document.text) % 20 == 0 for document in corpus.train)


@pytest.mark.parametrize(
    "name, message",
    [
        ("tiny_pairs", "legal for data.column: question, answer"),
        ("tiny_prose_test_only", "no split 'train'"),
        ("tiny_unreachable", "no route to host.*python_stdlib"),
        ("tiny_prose:9.9.9", "could not be prepared"),
        ("tiny_prose/zz", "could not be prepared"),
        ("tiny_prosa", "Did you mean 'tiny_prose'"),
        ("not a name", "could not be prepared"),
    ],
)
def test_an_unusable_tfds_corpus_raises_user_error(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        load_corpus(name, tmp_path)
