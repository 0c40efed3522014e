"""Unigram and bigram models of the training documents: what a task gives without understanding."""

import functools
from collections.abc import Sequence

import numpy as np

from sparse_dataflow.data.stored import TokenArray
from sparse_dataflow.evaluation.scoring import Counts, Request, Score

MOST_TOKENS = 4_000_000
"""Training tokens that are counted: the first so many."""

_STRENGTHS = (1.0, 10.0, 100.0, 1000.0)
_HELD_BACK = 0.1


class Ngrams:
    """Counts of tokens and of pairs of neighbours.

    The unigram is add-one smoothed; the bigram backs off to it with a Dirichlet prior (MacKay and
    Peto, 1995): p(b | a) = (count(a b) + m p(b)) / (count(a) + m). Of four strengths m the one is
    taken that predicts the last tenth of the counted tokens best from the rest.
    """

    def __init__(self, tokens: TokenArray, vocab_size: int):
        """Counts the first `MOST_TOKENS` of int [count] tokens below `vocab_size`."""
        tokens = np.asarray(tokens[:MOST_TOKENS], np.int64)
        self._vocab = vocab_size
        held = max(1, int(len(tokens) * _HELD_BACK))
        losses = {}
        for strength in _STRENGTHS:
            self._count(tokens[:-held], strength)
            losses[strength] = -np.log(self._pairs(tokens[-held - 1 : -1], tokens[-held:])).sum()
        self.strength = min(losses, key=losses.__getitem__)
        self._count(tokens, self.strength)

    def _count(self, tokens, strength):
        counts = np.bincount(tokens, minlength=self._vocab) + 1.0
        self.unigram = counts / counts.sum()
        self._before = np.bincount(tokens[:-1], minlength=self._vocab)
        pairs = tokens[:-1] * self._vocab + tokens[1:]
        self._codes, self._counts = np.unique(pairs, return_counts=True)
        self._m = strength
        self._largest = functools.cache(self._largest_after)

    def _pairs(self, before, after):
        """p(after | before), float [tokens]."""
        codes = before * self._vocab + after
        place = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        known = np.where(self._codes[place] == codes, self._counts[place], 0)
        return (known + self._m * self.unigram[after]) / (self._before[before] + self._m)

    def _largest_after(self, before):
        """The largest p(. | before)."""
        first, last = np.searchsorted(
            self._codes, [before * self._vocab, (before + 1) * self._vocab]
        )
        weights = self._m * self.unigram
        weights[self._codes[first:last] - before * self._vocab] += self._counts[first:last]
        return weights.max() / (self._before[before] + self._m)

    def score_unigram(self, requests: Sequence[Request]) -> tuple[list[Score], Counts]:
        """Scores as `scoring.score` does, with no regard to what stands before."""
        largest, scores = self.unigram.max(), []
        for _, after in requests:
            p = self.unigram[np.asarray(after)]
            scores.append((float(np.log(p).sum()), bool((p >= largest).all())))
        return scores, Counts(len(scores))

    def score_bigram(self, requests: Sequence[Request]) -> tuple[list[Score], Counts]:
        """The same, with regard to the one token before."""
        scores = []
        for before, after in requests:
            line = np.asarray([before[-1], *after], np.int64)
            p = self._pairs(line[:-1], line[1:])
            greedy = all(q >= self._largest(int(a)) * (1 - 1e-9) for a, q in zip(line, p))
            scores.append((float(np.log(p).sum()), greedy))
        return scores, Counts(len(scores))
