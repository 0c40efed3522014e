"""Means with honest errors, and paired differences between two models on the same items.

Items of one document are not independent, so errors are clustered by document, and two models are
compared by the differences on each item, as "Adding Error Bars to Evals" (arXiv 2411.00640,
sections 2.2 and 4) advises. With as few documents as a small corpus holds out, the normal
distribution would promise too much: Student's t with one degree fewer than documents is used.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
METHOD = (
    "Paired differences over items, standard errors clustered by document (arXiv 2411.00640), "
    "two-sided t-test with one degree of freedom fewer than documents."
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over items.

    Attributes:
      mean: over all items.
      error: its standard error; None where there are fewer than two documents.
      items: how many.
      documents: how many they are from.
    """

    mean: float
    error: float | None
    items: int
    documents: int


@dataclasses.dataclass(frozen=True)
class Paired:
    """The mean difference of two models on the same items.

    Attributes:
      difference: first minus second.
      low: lower end of its 95% interval; None where there are fewer than two documents.
      high: upper end.
      p: probability of a difference as large where there is none; two-sided.
    """

    difference: float
    low: float | None
    high: float | None
    p: float | None


def estimate(values: np.ndarray, documents: Sequence) -> Estimate:
    """Mean and clustered standard error; `values` float [items], `documents` names one an item.

    The error is sqrt(G / (G - 1) * sum over documents of (sum of residuals)²) / items for G
    documents, which is the usual one where every item is its own document.
    """
    values = np.asarray(values, np.float64)
    _, cluster = np.unique(np.asarray(documents), return_inverse=True)
    residuals = np.bincount(cluster, values - values.mean())
    count = len(residuals)
    error = None
    if count > 1:
        error = math.sqrt(count / (count - 1) * float(residuals @ residuals)) / len(values)
    return Estimate(float(values.mean()), error, len(values), count)


def paired(first: np.ndarray, second: np.ndarray, documents: Sequence) -> Paired:
    """Whether two models differ; both float [items], of the same items in the same order."""
    found = estimate(np.asarray(first) - np.asarray(second), documents)
    if found.error is None:
        return Paired(found.mean, None, None, None)
    from scipy import stats  # Half a second to import, and no training needs it.

    degrees = found.documents - 1
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees)) * found.error
    p = None if found.mean else 1.0  # Where no document differs from another, t says nothing.
    if found.error:
        p = float(2 * stats.t.sf(abs(found.mean) / found.error, degrees))
    return Paired(found.mean, found.mean - reach, found.mean + reach, p)
