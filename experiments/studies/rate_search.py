"""Choice of a learning rate by the same number of trials for every model."""

import math
from collections.abc import Mapping


def next_multiplier(losses: Mapping[float, float]) -> float:
    """Returns the multiplier of the learning rate to try next.

    Starts at 1 and doubles or halves until the best trial has a neighbour on both sides.  Then it
    halves the wider gap beside the best trial, on a logarithmic scale.

    Args:
      losses: multiplier -> loss of its trial; infinite for a training that diverged.
    """
    if not losses:
        return 1.0
    best = best_multiplier(losses)
    if math.isinf(losses[best]):
        return min(losses) / 4
    lower = max((m for m in losses if m < best), default=None)
    upper = min((m for m in losses if m > best), default=None)
    if upper is None:
        return 2 * best
    if lower is None:
        return best / 2
    return math.sqrt(best * (upper if upper / best >= best / lower else lower))


def best_multiplier(losses: Mapping[float, float]) -> float:
    """Returns the multiplier of the lowest loss."""
    return min(losses, key=losses.__getitem__)


def is_bracketed(losses: Mapping[float, float]) -> bool:
    """Returns whether trials with a lower and with a higher rate are worse than the best one."""
    best = best_multiplier(losses)
    return min(losses) < best < max(losses)
