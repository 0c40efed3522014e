"""Means with clustered standard errors, and paired differences between two models.

Items of one document are not independent, so standard errors are clustered by document. Two models
are compared by their differences on each item. Both follow "Adding Error Bars to Evals" (arXiv
2411.00640, sections 2.2 and 4). A small corpus has few held-out documents, so intervals use
Student's t with one degree of freedom fewer than documents.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from sparse_dataflow.core import sums

CONFIDENCE = 0.95
NORMAL = 1.959964
"""Quantile of the normal distribution for `CONFIDENCE`."""

METHOD = (
    "Paired differences over items, standard errors clustered by document (arXiv 2411.00640), "
    "two-sided t-test with one degree of freedom fewer than documents. Where no item differs, the "
    "interval of a score between 0 and 1 is the rule of three: 3 over the number of documents."
)


@dataclasses.dataclass(frozen=True)
class ClusteredMean:
    """Mean over items with a standard error clustered by document.

    Attributes:
      mean: mean over all items.
      error: standard error; None for fewer than two documents.
    """

    mean: float
    error: float | None
    items: int
    documents: int


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """Mean difference of two models on the same items.

    Attributes:
      difference: mean of the first model minus mean of the second.
      low: lower end of the 95% interval; None for fewer than two documents.
      high: upper end of the 95% interval; None for fewer than two documents.
      p: two-sided p-value; None where the t statistic is undefined, as where no item differs.
    """

    difference: float
    low: float | None
    high: float | None
    p: float | None


def clustered_mean(values: np.ndarray, documents: Sequence) -> ClusteredMean:
    """Returns the mean and its standard error clustered by document.

    The error is that of `sums.mean`, whose parts are documents.

    Args:
      values: float [items].
      documents: document of each item.
    """
    values = np.asarray(values, np.float64)
    _, cluster = np.unique(np.asarray(documents), return_inverse=True)
    mean = sums.mean(np.bincount(cluster, values), np.bincount(cluster))
    return ClusteredMean(mean.value, mean.error, len(values), mean.groups)


def is_share(metric: str) -> bool:
    """Returns whether a metric is a share of right answers, whose items are 0 or 1."""
    # A filter of the outputs may follow the name.
    return metric.partition(",")[0] in ("acc", "acc_norm", "exact_match")


def share_interval(
    share: float, error: float | None, items: int, documents: int
) -> tuple[float, float]:
    """Returns the 95% interval of a share of right answers by Wilson (JASA 22, 1927).

    It stays within 0 and 1, and does not shrink to a point where all items are right or wrong.

    Args:
      share: mean of items that are 0 or 1.
      error: its clustered standard error, which says how many independent items the documents are
        worth; None if unknown.
      items: number of items.
      documents: number of documents, which are the independent items where no item differs.
    """
    independent = float(documents)
    if error and 0 < share < 1:
        # The number of independent items whose share would have this error.
        independent = min(float(items), share * (1 - share) / error**2)
    z2 = NORMAL**2
    middle = (share + z2 / (2 * independent)) / (1 + z2 / independent)
    spread = math.sqrt(share * (1 - share) / independent + z2 / (4 * independent**2))
    margin = NORMAL * spread / (1 + z2 / independent)
    low, high = max(0.0, middle - margin), min(1.0, middle + margin)
    return min(low, share), max(high, share)


def paired_difference(
    first: ArrayLike, second: ArrayLike, documents: Sequence, bounded: bool = False
) -> PairedDifference:
    """Returns the paired difference of two models.

    Where no item differs, the observed variance is 0 and says nothing.  Of n independent documents
    without a difference, one more may differ with a probability of up to 3/n (95%: Hanley and
    Lippman-Hand 1983, "If nothing goes wrong, is everything all right?").

    Args:
      first: float [items], values of the first model.
      second: float [items], values of the second model on the same items.
      documents: document of each item.
      bounded: whether values lie between 0 and 1, so that a document that differs changes the mean
        by at most its share, and the interval ends at -1 and 1.
    """
    result = clustered_mean(np.asarray(first) - np.asarray(second), documents)
    if result.error is None:
        return PairedDifference(result.mean, None, None, None)
    if not np.any(np.asarray(first) != np.asarray(second)):
        most = min(1.0, 3 / result.documents) if bounded else None
        return PairedDifference(0.0, most and -most, most, None)
    from scipy import stats  # slow to import, and training does not need it

    degrees = result.documents - 1
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees)) * result.error
    p = None
    if result.error:
        p = float(2 * stats.t.sf(abs(result.mean) / result.error, degrees))
    low, high = result.mean - margin, result.mean + margin
    if bounded:
        low, high = max(low, -1.0), min(high, 1.0)
    return PairedDifference(result.mean, low, high, p)
