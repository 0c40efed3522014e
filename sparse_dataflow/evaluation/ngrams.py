"""Unigram and bigram models of the training tokens: baselines of the evaluation tasks."""

import functools
from collections.abc import Sequence

import numpy as np

from sparse_dataflow.data.cache import TokenArray
from sparse_dataflow.evaluation.scoring import Counts, Request, Score

MAX_TOKENS = 4_000_000
"""Number of training tokens that are counted."""

_STRENGTHS = (1.0, 10.0, 100.0, 1000.0)
_VALIDATION_SHARE = 0.1


class Ngrams:
    """Unigram and bigram models from token counts.

    The unigram is add-one smoothed. The bigram backs off to it with a Dirichlet prior (MacKay and
    Peto, 1995): p(b | a) = (count(a b) + m p(b)) / (count(a) + m). The prior strength m is the one
    of four that predicts the last tenth of the counted tokens best.
    """

    def __init__(self, tokens: TokenArray, vocab_size: int):
        """Counts the first `MAX_TOKENS` of `tokens`, int [count] below `vocab_size`."""
        tokens = np.asarray(tokens[:MAX_TOKENS], np.int64)
        self._vocab = vocab_size
        held_out = max(1, int(len(tokens) * _VALIDATION_SHARE))
        before, after = tokens[-held_out - 1 : -1], tokens[-held_out:]
        losses = {}
        for strength in _STRENGTHS:
            self._count(tokens[:-held_out], strength)
            losses[strength] = -np.log(self._bigram(before, after)).sum()
        self.strength = min(losses, key=losses.__getitem__)
        # With the strength chosen, the held-out tenth is counted as well.
        self._count(tokens, self.strength)

    def _count(self, tokens, strength):
        counts = np.bincount(tokens, minlength=self._vocab) + 1.0
        self.unigram = counts / counts.sum()
        self._before = np.bincount(tokens[:-1], minlength=self._vocab)
        pairs = tokens[:-1] * self._vocab + tokens[1:]
        self._codes, self._counts = np.unique(pairs, return_counts=True)
        self._strength = strength
        self._largest = functools.cache(self._largest_after)

    def _bigram(self, before, after):
        """Returns p(after | before), float [tokens]."""
        # A pair is one number, so that counts are a sorted array: a table of all pairs would have
        # the square of the vocabulary.
        codes = before * self._vocab + after
        index = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        counts = np.where(self._codes[index] == codes, self._counts[index], 0)
        return (counts + self._strength * self.unigram[after]) / (
            self._before[before] + self._strength
        )

    def _largest_after(self, before):
        """Returns max over b of p(b | before)."""
        # All pairs that begin with a token are neighbours.
        first, last = np.searchsorted(
            self._codes, [before * self._vocab, (before + 1) * self._vocab]
        )
        weights = self._strength * self.unigram
        # What is left of a code is the second token of the pair.
        weights[self._codes[first:last] - before * self._vocab] += self._counts[first:last]
        return weights.max() / (self._before[before] + self._strength)

    def score_unigram(self, requests: Sequence[Request]) -> tuple[list[Score], Counts]:
        """Scores requests with the unigram model; returns the same as `scoring.score`."""
        largest, scores = self.unigram.max(), []
        for _, after in requests:
            p = self.unigram[np.asarray(after)]
            scores.append((float(np.log(p).sum()), bool((p >= largest).all())))
        return scores, Counts(len(scores))

    def score_bigram(self, requests: Sequence[Request]) -> tuple[list[Score], Counts]:
        """Scores requests with the bigram model; returns the same as `scoring.score`."""
        scores = []
        for before, after in requests:
            tokens = np.asarray([before[-1], *after], np.int64)
            p = self._bigram(tokens[:-1], tokens[1:])
            # Probabilities are computed along two paths, which may differ in their last bits.
            greedy = all(q >= self._largest(int(a)) * (1 - 1e-9) for a, q in zip(tokens, p))
            scores.append((float(np.log(p).sum()), greedy))
        return scores, Counts(len(scores))
