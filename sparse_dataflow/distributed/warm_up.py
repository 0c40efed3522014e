"""Runs what is about to be timed until the process stops growing.

Pages that are touched for the first time cost a fault each, and on a virtual machine a step can
spend more in faults than in computing; none of that is the step's own time.
"""

import resource
from collections.abc import Callable
from typing import TypeVar

from sparse_dataflow.distributed import processes

T = TypeVar("T")

MOST_RUNS, FEW_PAGES = 8, 2000


def warm_up(run: Callable[[], T], least: int = 1) -> T:
    """Calls `run` at least `least` times, and on until one call touches few new pages, MOST_RUNS
    times in all; where a run has several processes, as often on each.

    Args:
      run: does the work and waits for its end.
      least: calls.

    Returns:
      What the last call gave.
    """
    for number in range(1, MOST_RUNS + 1):
        touched = _pages_touched()
        result = run()
        grows = _pages_touched() - touched >= FEW_PAGES
        if number >= least and not processes.anywhere(grows):
            break
    return result


def _pages_touched():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
