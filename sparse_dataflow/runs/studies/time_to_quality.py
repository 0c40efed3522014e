"""Time to quality: what a training needs to reach the final loss of the best-tuned dense model."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Effort:
    """What a training needs to reach a loss.

    Attributes:
      tokens: training tokens.
      flops: training FLOPs.
      seconds: training time, by the median time of a step.
    """

    tokens: float
    flops: float
    seconds: float


def mean_curve(results: Sequence[dict]) -> np.ndarray:
    """Returns the mean over seeds of the evaluation curves, float64 [evaluations, 2].

    Args:
      results: results of `study.train` of equal length; a row is (tokens, bits per byte).
    """
    return np.mean([result["curve"] for result in results], axis=0)


def crossing(curve: np.ndarray, target: float) -> float | None:
    """Returns the tokens at which a curve first reaches `target`; None if it does not.

    Interpolates linearly between evaluations.  A curve that begins below the target reaches it at
    its first evaluation at the latest, which is what is returned.

    Args:
      curve: float [evaluations, 2], tokens and bits per byte.
      target: bits per byte.
    """
    tokens, bits = np.asarray(curve, np.float64).T
    below = np.flatnonzero(bits <= target)
    if not len(below):
        return None
    first = int(below[0])
    if first == 0 or bits[first] == target:
        return float(tokens[first])
    share = (bits[first - 1] - target) / (bits[first - 1] - bits[first])
    return float(tokens[first - 1] + share * (tokens[first] - tokens[first - 1]))


def effort(results: Sequence[dict], target: float) -> Effort | None:
    """Returns what trainings of several seeds need on average; None if they miss the target.

    The FLOPs of a token are the mean over the training, so they suit models of constant shape.
    """
    tokens = crossing(mean_curve(results), target)
    if tokens is None:
        return None
    first = results[0]
    step_seconds = float(np.median([result["step_seconds"] for result in results]))
    steps = tokens * first["steps"] / first["tokens"]
    return Effort(tokens, tokens * first["flops"] / first["tokens"], steps * step_seconds)
