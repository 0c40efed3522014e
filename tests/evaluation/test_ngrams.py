"""The n-gram baselines follow their formulas."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.evaluation.ngrams import Ngrams

V = 7


def table(tokens, strength):
    """Returns (p(b), p(b | a) [V, V]) by direct counting."""
    unigram = (np.bincount(tokens, minlength=V) + 1) / (len(tokens) + V)
    pairs = np.zeros((V, V))
    for a, b in itertools.pairwise(tokens):
        pairs[a, b] += 1
    mixed = pairs + strength * unigram
    return unigram, mixed / mixed.sum(axis=1, keepdims=True)


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_scores_follow_the_formulas(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V - 1, rng.integers(12, 300))
    model = Ngrams(tokens, V)
    unigram, bigram = table(tokens, model.strength)
    requests = [
        (rng.integers(0, V, 3).tolist(), rng.integers(0, V, rng.integers(1, 4)).tolist())
        for _ in range(8)
    ]
    for (before, after), (single, _), (double, greedy) in zip(
        requests, model.score_unigram(requests)[0], model.score_bigram(requests)[0]
    ):
        sequence = [before[-1], *after]
        p = bigram[sequence[:-1], sequence[1:]]
        np.testing.assert_allclose(single, np.log(unigram[after]).sum())
        np.testing.assert_allclose(double, np.log(p).sum())
        assert greedy == bool((p >= bigram[sequence[:-1]].max(axis=1) * (1 - 1e-9)).all())


def test_the_bigram_predicts_periodic_text():
    model = Ngrams(np.tile([0, 1, 2, 3], 50), V)
    (right, greedy), (wrong, not_greedy) = model.score_bigram([([0], [1, 2]), ([0], [2])])[0]
    assert greedy and not not_greedy and right > np.log(0.8) > wrong
