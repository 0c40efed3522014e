"""Shrinks a case that fails to the fewest settings that still fail."""

from collections.abc import Callable

from storm.case import Case


def shrunk(case: Case, fails: Callable[[Case], bool], most: int = 24) -> tuple[Case, int]:
    """Drops settings of a case back to their defaults, one by one, while it still fails.

    Args:
      fails: whether a case fails in the same way.
      most: number of cases that are tried.

    Returns:
      The smallest case that fails, and the number of cases that were tried.
    """
    tried = 0
    halves = _halves(case)
    for half in halves:
        if tried < most and half != case:
            tried += 1
            if fails(half):
                case = half
                break
    dropped = True
    while dropped:
        dropped = False
        for path, _ in case.changes:
            if tried >= most:
                return case, tried
            tried += 1
            if fails(smaller := case.without(path)):
                case, dropped = smaller, True
    return case, tried


def _halves(case):
    """Returns both halves of a case of many settings, which are tried first."""
    if len(case.changes) < 5:
        return []
    middle = len(case.changes) // 2
    return [Case(case.changes[:middle]), Case(case.changes[middle:])]
