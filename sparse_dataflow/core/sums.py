"""Means as sums with their counts, divided once, and how exact they are.

Parts of a mean, such as batches, documents or micro-batches, are seldom equally large.  So a mean
of means is wrong, and a spread of sums is mostly that of their counts.  Second moments of inputs
and outputs, about a centre, are in `pruning.moments`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Mean(NamedTuple):
    """A mean over parts.

    Attributes:
      value: the sum over the count; NaN for none.
      error: standard error; None for fewer than two parts, whose spread nobody knows.
      groups: number of independent parts.
    """

    value: float
    error: float | None
    groups: int


def mean(sums: ArrayLike, counts: ArrayLike = 1.0) -> Mean:
    """Returns the mean of parts by their sums and counts.

    The error is that of a ratio: sqrt(G / (G - 1) * sum over parts of (sum - mean * count)²) over
    the total count, for G parts with a count.  Of equal counts it is the usual standard error.

    Args:
      sums: float [parts].
      counts: float [parts], the items or weight of each; one number for equal parts.
    """
    sums = np.asarray(sums, np.float64)
    counts = np.broadcast_to(np.asarray(counts, np.float64), sums.shape)
    sums, counts = sums[counts > 0], counts[counts > 0]
    groups, total = len(sums), float(counts.sum())
    if not groups:
        return Mean(math.nan, None, 0)
    value = math.fsum(sums) / total
    if groups < 2:
        return Mean(value, None, groups)
    residuals = sums - value * counts
    error = math.sqrt(groups / (groups - 1) * float(residuals @ residuals)) / total
    return Mean(value, error, groups)


def half_range_text(values: Sequence[float], form: str = ".4f") -> str:
    """Returns half the range of values, "-" of a single one."""
    return format((max(values) - min(values)) / 2, form) if len(values) > 1 else "-"


def error_text(values: ArrayLike, form: str) -> str:
    """Returns " ± " and the standard error of a mean of values, "" where a single one has none."""
    error = mean(values).error
    return "" if error is None else f" ± {error:{form}}"
