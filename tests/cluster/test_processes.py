"""Collective operations between the processes of a run."""

import numpy as np
import pytest

from sparse_dataflow.cluster import processes


@pytest.mark.parametrize("others, count", [((), 1), ((0, 1, 1), 2), ((0, 0, 0), 4), ((7, 8, 9), 1)])
def test_processes_are_counted_by_their_host(monkeypatch, others, count):
    """`others` are differences between the digests of other host names and this one's."""
    monkeypatch.setattr(processes.jax, "process_count", lambda: 1 + len(others))
    gather = lambda name: np.array([name, *(name + np.uint32(d) for d in others)])  # noqa: E731
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
    assert processes.count_on_host() == count
