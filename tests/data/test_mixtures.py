import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.config import settings
from sparse_dataflow.data.batches import TokenMixture, TrainBatches, drawn, drawn_before
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.corpus.mixtures import mixture_weights
from sparse_dataflow.data.corpus.names import is_path
from sparse_dataflow.data.tokenizer import train_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import RunConfig


def test_weights_add_up_to_one_and_names_may_have_colons():
    assert mixture_weights("a:3, tfds/x:1.0.0:1") == {"a": 0.75, "tfds/x:1.0.0": 0.25}
    assert mixture_weights("c4/en:1.0.0") == mixture_weights("one corpus") == {}


def test_an_existing_path_is_no_mixture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:1,b:1").mkdir()
    assert mixture_weights("a:1,b:1") == {}


@pytest.mark.parametrize("text", ["a,b:1", "a:0,b:1", "a:nan,b:1", ":1,b:1", "a:1,a:2", "a:1,"])
def test_an_illegal_mixture_is_refused(text):
    with pytest.raises(UserError, match=r"mixture has .*legal"):
        mixture_weights(text)


def test_a_mixture_may_be_longer_than_a_path():
    text = ",".join(f"~nobody/language_{number}:1" for number in range(300))
    setting = settings.by_path(RunConfig)["data.corpus"]
    assert settings.parsed(setting, text, "--corpus").count(",") == 299
    assert len(mixture_weights(text)) == 300 and not is_path("x" * 5000)
    with pytest.raises(UserError, match="too long"):
        settings.parsed(setting, "books:1," + "x" * 300 + ":1", "--corpus")


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, word in (("books", "page"), ("code", "def")):
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{number}.txt").write_text(f"{word} {number} " * 50)
    return load_corpus("books:0.7,code:0.3", tmp_path / "cache")


def test_a_mixture_has_the_documents_of_its_corpora(mixed, tmp_path):
    parts = [corpus for _, corpus, _ in mixed.mixture]
    for split in ("train", "validation"):
        documents = list(getattr(mixed, split))
        expected = [document for corpus in parts for document in getattr(corpus, split)]
        assert [document.text for document in documents] == [d.text for d in expected]
        assert len({document.id for document in documents}) == len(documents)
    assert mixed.train[-1] == mixed.train[len(mixed.train) - 1]
    other = load_corpus("books:0.6,code:0.4", tmp_path / "cache")
    assert other.content_hash != mixed.content_hash


def test_tokens_of_a_mixture_are_those_of_its_corpora(mixed, tmp_path):
    tokenizer = train_tokenizer(mixed, 300, tmp_path / "cache")
    chained = prepare_tokens(mixed, tokenizer, tmp_path / "cache").train
    parts = [prepare_tokens(c, tokenizer, tmp_path / "cache").train for _, c, _ in mixed.mixture]
    expected = np.concatenate([part.tokens[:] for part in parts])
    np.testing.assert_array_equal(chained.tokens, expected)
    border = len(parts[0].tokens)
    np.testing.assert_array_equal(
        chained.tokens[border - 3 : border + 5], expected[border - 3 : border + 5]
    )
    assert chained.documents == sum(part.documents for part in parts)
    assert chained.text_bytes == sum(part.text_bytes for part in parts)


@given(weight=st.floats(0.05, 0.95), step=st.integers(0, 10**6), seed=st.integers(0, 2**32 - 1))
def test_windows_are_drawn_by_weight_from_any_step(weight, step, seed):
    sources = np.zeros(2001, np.uint16), np.ones(5003, np.uint16)
    mixture = TokenMixture(sources, (weight, 1 - weight))
    batches = TrainBatches(mixture, batch_size=100, sequence_length=8, seed=seed)
    tokens = batches[step].tokens
    assert (tokens == tokens[:, :1]).all()
    assert abs((tokens[:, 0] == 0).sum() - 100 * weight) <= 2
    local = TrainBatches(mixture, 100, 8, seed, rows=(3, 50))[step].tokens
    np.testing.assert_array_equal(local, tokens[[3, 50]])


def shares(numbers):
    return tuple(number / sum(numbers) for number in numbers)


WEIGHTS = st.lists(st.floats(0.02, 1), min_size=2, max_size=5).map(shares)


@given(weights=WEIGHTS, phase=st.floats(0, 0.99), number=st.integers(0, 300))
def test_each_source_is_drawn_by_its_weight_in_order(weights, phase, number):
    counts = [0] * len(weights)
    for n in range(number):
        source, index = drawn(weights, phase, n)
        assert index == counts[source]
        counts[source] += 1
    assert drawn_before(weights, phase, number) == counts


@pytest.mark.parametrize(
    "weights", [(0.07, 0.93), (0.333, 0.667), (0.123, 0.246, 0.631), (0.31, 0.19, 0.27, 0.23)]
)
def test_windows_of_stored_text_are_the_fractions_of_a_mixture(weights):
    sources = tuple(np.full(80001, number, np.uint16) for number in range(len(weights)))
    batches = TrainBatches(TokenMixture(sources, weights), 4, 8, seed=1)
    drawn_sources = [int(batches.window(number)[0]) for number in range(1000)]
    counts = np.bincount(drawn_sources, minlength=len(weights))
    assert np.abs(counts - 1000 * np.asarray(weights)).max() <= 2
    streamed = [drawn(weights, 0.0, number)[0] for number in range(1000)]
    assert drawn_sources == streamed


@pytest.mark.parametrize("weights", [(0.26, 0.74), (0.5, 0.5), (0.2, 0.3, 0.5)])
def test_runs_of_older_versions_keep_the_windows_that_grain_mixed(weights):
    sources = tuple(np.arange(100 * n, 100 * n + 91) for n in range(len(weights)))
    mixture = TokenMixture(sources, weights, rounded_weights=True)
    batches = TrainBatches(mixture, 3, 9, seed=5)
    windows = [[tokens[9 * n : 9 * n + 10] for n in range(10)] for tokens in sources]
    parts = [
        grain.MapDataset.source(windows[n]).seed(5 + n).shuffle().repeat()
        for n in range(len(sources))
    ]
    mixed = grain.MapDataset.mix(parts, weights)
    for step in (0, 1, 77):
        expected = np.stack([mixed[3 * step + row] for row in range(3)])
        np.testing.assert_array_equal(batches[step].tokens, expected[:, :-1])


def test_each_source_is_read_once_in_an_epoch_of_its_own():
    sources = np.arange(41), np.arange(100, 141)
    batches = TrainBatches(TokenMixture(sources, (0.5, 0.5)), batch_size=10, sequence_length=8)
    rows = {tuple(row) for row in batches[0].tokens}
    assert len(rows) == 10


def test_a_source_without_a_window_is_refused():
    sources = np.arange(41), np.arange(5)
    with pytest.raises(UserError, match="5 tokens, too few"):
        TrainBatches(TokenMixture(sources, (0.5, 0.5)), batch_size=1, sequence_length=8)


@pytest.mark.parametrize(
    ("weights", "phase", "sources"),
    [
        ((0.5, 0.5), 0.0, [0, 1, 0, 1, 0, 1]),
        ((0.75, 0.25), 0.0, [0, 0, 1, 0, 0, 0]),
        ((0.5, 0.5), 0.5, [1, 0, 1, 0, 1, 0]),
        ((0.5, 0.25, 0.25), 0.0, [0, 1, 0, 2, 0, 1]),
    ],
)
def test_sources_take_turns_from_an_offset_each(weights, phase, sources):
    """Windows of a run are those of every version that resumes it."""
    assert [drawn(weights, phase, number)[0] for number in range(6)] == sources
