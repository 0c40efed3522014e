"""Time to quality: what a training needs to reach the final loss of the best-tuned dense model."""

import dataclasses
from collections.abc import Mapping, Sequence

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


def effort(trainings: Mapping[int, Sequence[dict]], target: float) -> Effort | None:
    """Returns what an arm needs on average to reach `target`; None if it misses it at every length.

    The shortest length that ends at or below the target reaches it.  Between its end and that of
    the next shorter length the tokens are interpolated on a logarithmic scale: a training of that
    many tokens would end at the target, with a schedule of its own.  If no shorter length is known,
    the mean evaluation curve gives the tokens; there the learning rate has not fallen yet.

    Args:
      trainings: optimizer steps -> results of the seeds of that length.  The FLOPs of a token are
        the mean over a training, so they suit models of constant shape.
      target: bits per byte of the periodic evaluation.
    """
    ends = {steps: float(mean_curve(trainings[steps])[-1, 1]) for steps in sorted(trainings)}
    steps = next((steps for steps, bits in ends.items() if bits <= target), None)
    if steps is None:
        return None
    results = trainings[steps]
    first = results[0]
    shorter = max((each for each in ends if each < steps), default=None)
    if shorter is None:
        tokens = crossing(mean_curve(results), target) or first["tokens"]
    else:
        share = (ends[shorter] - target) / (ends[shorter] - ends[steps])
        tokens = first["tokens"] * (shorter / steps) ** (1 - share)
    step_seconds = float(np.median([result["step_seconds"] for result in results]))
    seconds = tokens / first["tokens"] * first["steps"] * step_seconds
    return Effort(tokens, tokens / first["tokens"] * first["flops"], seconds)
