"""Warm-up before a timing: runs the work until the process stops growing.

The first touch of a page costs a fault. On a virtual machine, a step can spend more time in faults
than in computing, which is not the step's own time.
"""

import resource
from collections.abc import Callable
from typing import TypeVar

from sparse_dataflow.core import collectives

T = TypeVar("T")

MAX_RUNS, FEW_PAGES = 8, 2000


def warm_up(run: Callable[[], T], min_runs: int = 1) -> T:
    """Calls `run` until one call touches fewer than FEW_PAGES new pages.

    Calls it at least `min_runs` and at most MAX_RUNS times, equally often on every process.

    Args:
      run: does the work and waits for its end.
      min_runs: minimum number of calls.

    Returns:
      The result of the last call.
    """
    for number in range(1, MAX_RUNS + 1):
        pages_before = _pages_touched()
        result = run()
        grows = _pages_touched() - pages_before >= FEW_PAGES
        if number >= min_runs and not collectives.any_process(grows):
            break
    return result


def _pages_touched():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
