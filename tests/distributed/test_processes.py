"""What the processes of a run tell each other."""

import numpy as np
import pytest

from sparse_dataflow.distributed import processes


@pytest.mark.parametrize("others, here", [((), 1), ((0, 1, 1), 2), ((0, 0, 0), 4), ((7, 8, 9), 1)])
def test_processes_are_counted_by_their_machine(monkeypatch, others, here):
    """`others` are differences of the names' digests from this machine's."""
    monkeypatch.setattr(processes.jax, "process_count", lambda: 1 + len(others))
    gather = lambda mine: np.array([mine, *(mine + np.uint32(d) for d in others)])  # noqa: E731
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
    assert processes.on_this_machine() == here
