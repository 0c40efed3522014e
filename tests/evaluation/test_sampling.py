"""Sampled tokens and their frequencies."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.evaluation.sampling import Sampling, sample_tokens
from sparse_dataflow.files.errors import UserError

LOGITS = np.log(np.array([0.05, 0.4, 0.05, 0.3, 0.2], np.float32))


def sample(sampling, count=2000, logits=LOGITS):
    return np.asarray(
        sample_tokens(
            np.tile(logits, (count, 1)),
            jax.random.split(jax.random.key(sampling.seed), count),
            np.float32(sampling.temperature or 1),
            np.int32(sampling.top_k),
            np.float32(sampling.top_p),
            stochastic=sampling.stochastic,
            filters=sampling.filters,
        )
    )


def test_temperature_0_is_greedy():
    assert set(sample(Sampling()).tolist()) == {1}


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
        # The first of the two tokens in top_k has probability 4/7.
        (Sampling(1.0, top_k=2, top_p=0.5), {1}),
        # At temperature 0.5 the first two tokens have probability 0.85.
        (Sampling(0.5, top_p=0.8), {1, 3}),
    ],
)
def test_all_legal_tokens_and_no_others_are_sampled(sampling, legal):
    assert set(sample(sampling).tolist()) == legal


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, top_k=5)])
def test_sample_frequencies_match_the_probabilities(sampling):
    counts = np.bincount(sample(sampling, 20_000), minlength=5) / 20_000
    np.testing.assert_allclose(counts, np.exp(LOGITS), atol=0.02)


def test_samples_depend_on_the_seed():
    first, same, other = (sample(Sampling(1.0, seed=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert np.any(first != other)


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=6, max_size=6), st.integers(1, 7))
def test_ties_keep_exactly_top_k(logits, top_k):
    logits = np.asarray(logits, np.float32)
    tokens = set(sample(Sampling(9.0, top_k=top_k), 300, logits).tolist())
    assert tokens <= set(np.argsort(-logits, kind="stable")[:top_k].tolist())


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_invalid_values_raise(values, name):
    with pytest.raises(UserError, match=f"{name}=.* not legal: it must be"):
        Sampling(**values)
