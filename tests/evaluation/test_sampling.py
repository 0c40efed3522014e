"""Which tokens may be drawn, and how often."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.evaluation.sampling import Sampling, next_tokens
from sparse_dataflow.files.errors import UserError

LOGITS = np.log(np.array([0.05, 0.4, 0.05, 0.3, 0.2], np.float32))


def draw(sampling, count=2000, logits=LOGITS):
    return np.asarray(
        next_tokens(
            np.tile(logits, (count, 1)),
            jax.random.split(jax.random.key(sampling.seed), count),
            np.float32(sampling.temperature or 1),
            np.int32(sampling.top_k),
            np.float32(sampling.top_p),
            draws=sampling.draws,
            filters=sampling.filters,
        )
    )


def test_without_temperature_the_most_likely_token():
    assert set(draw(Sampling()).tolist()) == {1}


@pytest.mark.parametrize(
    ("sampling", "legal"),
    [
        (Sampling(1.0), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_k=1), {1}),
        (Sampling(1.0, top_k=2), {1, 3}),
        (Sampling(1.0, top_k=99), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_p=0.01), {1}),
        (Sampling(1.0, top_p=0.65), {1, 3}),
        (Sampling(1.0, top_p=0.75), {1, 3, 4}),
        # Of the two that top_k leaves, the first has 4/7 of the chances.
        (Sampling(1.0, top_k=2, top_p=0.5), {1}),
        # Four fifths of the squares' chances lie in the first two.
        (Sampling(0.5, top_p=0.8), {1, 3}),
    ],
)
def test_only_legal_tokens_are_drawn_and_all_of_them(sampling, legal):
    assert set(draw(sampling).tolist()) == legal


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, top_k=5)])
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling):
    counts = np.bincount(draw(sampling, 20_000), minlength=5) / 20_000
    np.testing.assert_allclose(counts, np.exp(LOGITS), atol=0.02)


def test_the_seed_decides():
    one, same, other = (draw(Sampling(1.0, seed=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert np.any(one != other)


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=6, max_size=6), st.integers(1, 7))
def test_ties_leave_exactly_top_k(logits, top_k):
    logits = np.asarray(logits, np.float32)
    found = set(draw(Sampling(9.0, top_k=top_k), 300, logits).tolist())
    assert found <= set(np.argsort(-logits, kind="stable")[:top_k].tolist())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_illegal_values_are_named(values, named):
    with pytest.raises(UserError, match=f"{named} .* legal"):
        Sampling(**values)
