"""The average-parameter law (arXiv 2501.12486), fitted to the study's runs.

L = irreducible + a / N^alpha + b / D^beta, where N is the mean number of stored weights over the
training and D its tokens: Chinchilla's form (arXiv 2203.15556, section 3.3).
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from scipy import optimize, special

HUBER = 1e-3
"""Residual of the log loss above which a run counts linearly (arXiv 2203.15556, appendix D.2)."""

LOG_BOUNDS = np.array([(-10, -20, -20), (5, 40, 40)], float)
"""Bounds of the logarithms of the irreducible loss and of both factors."""

EXPONENTS, STARTS = np.geomspace(0.05, 2.5, 25), 4
"""Exponents of the grid whose best points the fit starts from, and their number."""


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


def fit(
    weights: Sequence[float] | np.ndarray,
    tokens: Sequence[float] | np.ndarray,
    losses: Sequence[float] | np.ndarray,
) -> Law:
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

    ones = np.ones_like(logs)

    def log_terms(point):
        irreducible, a, alpha, b, beta = point
        return np.stack([irreducible * ones, a - alpha * log_weights, b - beta * log_tokens])

    def residuals(point):
        return special.logsumexp(log_terms(point), axis=0) - logs

    def slopes(point):
        first, second, third = special.softmax(log_terms(point), axis=0)
        return np.stack([first, second, -second * log_weights, third, -third * log_tokens], axis=1)

    def start(alpha, beta):
        """Returns (error, point): the other three constants are a linear fit of relative errors."""
        terms = np.stack([ones, np.exp(-alpha * log_weights), np.exp(-beta * log_tokens)], axis=1)
        factors, error = optimize.nnls(terms / np.exp(logs)[:, None], ones)
        irreducible, a, b = np.clip(np.log(np.maximum(factors, 1e-300)), *LOG_BOUNDS)
        return error, (irreducible, a, alpha, b, beta)

    exponents = itertools.product(EXPONENTS, EXPONENTS)
    starts = [point for _, point in sorted(start(*each) for each in exponents)[:STARTS]]
    low, high = LOG_BOUNDS
    bounds = [*low[:2], 0, low[2], 0], [*high[:2], 3, high[2], 3]
    options = {"jac": slopes, "loss": "huber", "f_scale": HUBER, "bounds": bounds}
    fits = (optimize.least_squares(residuals, point, **options) for point in starts)
    irreducible, a, alpha, b, beta = min(fits, key=lambda each: each.cost).x
    return Law(*map(float, (np.exp(irreducible), np.exp(a), alpha, np.exp(b), beta)))


def errors(law: Law, weights, tokens, losses) -> np.ndarray:
    """Returns the predicted losses over the measured ones, minus 1."""
    predicted = law.loss(np.asarray(weights, float), np.asarray(tokens, float))
    return predicted / np.asarray(losses, float) - 1
