"""The average-parameter law (arXiv 2501.12486), fitted to the study's runs.

L = irreducible + a / N^alpha + b / D^beta, where N is the mean number of stored weights over the
training and D its tokens: Chinchilla's form (arXiv 2203.15556, section 3.3).
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
from scipy import optimize

HUBER = 1e-3
"""Residual of the log loss above which a run counts linearly (arXiv 2203.15556, appendix D.2)."""


@dataclasses.dataclass(frozen=True)
class Law:
    """Constants of the law.

    Attributes:
      irreducible: loss of endless weights and tokens.
      a: of the weights' term.
      alpha: its exponent.
      b: of the tokens' term.
      beta: its exponent.
    """

    irreducible: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, weights: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the losses of trainings, from float [n] weights and tokens."""
        return self.irreducible + self.a * weights**-self.alpha + self.b * tokens**-self.beta


def fit(weights: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> Law:
    """Returns the law with the least Huber loss of the log losses, from several starts.

    Args:
      weights: of each run, on average over its training; at least two values.
      tokens: of each run; at least two values.
      losses: held-out losses of the runs; at least five.

    Raises:
      ValueError: the runs do not determine the constants.
    """
    if len(losses) < 5 or min(len(set(weights)), len(set(tokens))) < 2:
        raise ValueError("a law of five constants needs five runs of unlike weights and tokens")
    log_weights, log_tokens, logs = (
        np.log(np.asarray(v, float)) for v in (weights, tokens, losses)
    )

    def residuals(point):
        irreducible, a, alpha, b, beta = point
        terms = irreducible, a - alpha * log_weights, b - beta * log_tokens
        return functools.reduce(np.logaddexp, terms) - logs

    starts = itertools.product((-1.0, 0.5), (0.0, 3.0), (0.2, 0.5), (0.0, 5.0), (0.2, 0.5))
    bounds = [-10, -20, 0, -20, 0], [5, 40, 3, 40, 3]
    fits = (
        optimize.least_squares(residuals, s, loss="huber", f_scale=HUBER, bounds=bounds)
        for s in starts
    )
    irreducible, a, alpha, b, beta = min(fits, key=lambda each: each.cost).x
    return Law(*map(float, (np.exp(irreducible), np.exp(a), alpha, np.exp(b), beta)))


def errors(law: Law, weights, tokens, losses) -> np.ndarray:
    """Returns the predicted losses over the measured ones, minus 1."""
    predicted = law.loss(np.asarray(weights, float), np.asarray(tokens, float))
    return predicted / np.asarray(losses, float) - 1
