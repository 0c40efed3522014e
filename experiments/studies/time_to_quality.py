"""Time to quality: what a training needs to reach the final loss of the best-tuned dense model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Effort:
    """What a training needs to reach a loss.

    Attributes:
      tokens: training tokens.
      flops: training FLOPs.
      seconds: training time, by the median step of the arm's fastest training, as other work on the
        machine only slows a step.
    """

    tokens: float
    flops: float
    seconds: float


def mean_bits(results: Sequence[dict]) -> float:
    """Returns the held-out bits per byte, the mean over results; infinite if one diverged."""
    return sum(bits_per_byte(result) for result in results) / len(results)


def bits_per_byte(result: dict) -> float:
    """Returns the bits per byte of a result; infinite for a training that diverged."""
    bits = result["bits_per_byte"]
    return math.inf if bits is None else bits


def mean_curve(results: Sequence[dict]) -> np.ndarray:
    """Returns the mean over seeds of the evaluation curves, float64 [evaluations, 2].

    A periodic evaluation reads a part of the split, the last one all of it.  So each curve is moved
    by a constant to end at its result.

    Args:
      results: results of `study.train` of equal length; a row is (tokens, bits per byte).
    """
    curves = np.array([result["curve"] for result in results], np.float64)
    ends = np.array([result["bits_per_byte"] for result in results])
    curves[:, :, 1] += (ends - curves[:, -1, 1])[:, None]
    return curves.mean(0)


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


def effort(trainings: Mapping[int, Sequence[dict]], target: float) -> Effort | None:
    """Returns what an arm needs on average to reach `target`; None if it misses it at every length.

    The shortest length that ends at or below the target reaches it.  Between its end and that of
    the next shorter length the tokens are interpolated on a logarithmic scale: a training of that
    many tokens would end at the target, with a schedule of its own.  If no shorter length is known,
    the mean evaluation curve gives the tokens; there the learning rate has not fallen yet.

    Args:
      trainings: optimizer steps -> results of the seeds of that length.  The FLOPs of a token are
        the mean over a training, so they suit models of constant shape.
      target: held-out bits per byte.
    """
    ends = {steps: mean_bits(trainings[steps]) for steps in sorted(trainings)}
    steps = next((steps for steps, bits in ends.items() if bits <= target), None)
    if steps is None:
        return None
    results = trainings[steps]
    first = results[0]
    shorter = max((each for each in ends if each < steps), default=None)
    if shorter is None:
        tokens = crossing(mean_curve(results), target) or first["tokens"]  # Its end, rounded.
    else:
        share = (ends[shorter] - target) / (ends[shorter] - ends[steps])
        tokens = first["tokens"] * (shorter / steps) ** (1 - share)
    step_seconds = min(r["step_seconds"] for each in trainings.values() for r in each)
    seconds = tokens / first["tokens"] * first["steps"] * step_seconds
    return Effort(tokens, tokens / first["tokens"] * first["flops"], seconds)
