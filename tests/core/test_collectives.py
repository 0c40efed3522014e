"""Host values that the processes of a run exchange."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core import collectives


@pytest.mark.parametrize("others, count", [((), 1), ((0, 1, 1), 2), ((0, 0, 0), 4), ((7, 8, 9), 1)])
def test_processes_are_counted_by_their_host(monkeypatch, others, count):
    """`others` are differences between the digests of other host names and this one's."""
    monkeypatch.setattr(collectives.jax, "process_count", lambda: 1 + len(others))
    gather = lambda name: np.array([name, *(name + np.uint32(d) for d in others)])  # noqa: E731
    monkeypatch.setattr(collectives.multihost_utils, "process_allgather", gather)
    assert collectives.count_on_host() == count


@given(
    tables=st.integers(1, 3).flatmap(
        lambda rows: st.lists(
            st.lists(st.tuples(*[st.integers(-1, 9)] * 3), min_size=rows, max_size=rows),
            min_size=2,
            max_size=4,
        )
    )
)
def test_a_record_comes_whole_from_the_process_that_is_furthest(tables):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives.jax, "process_count", lambda: len(tables))
        patch.setattr(
            collectives.multihost_utils, "process_allgather", lambda _: np.asarray(tables, np.int32)
        )
        merged = collectives.newest(np.asarray(tables[-1], np.int32))
    for row, record in enumerate(merged.tolist()):
        offered = [list(table[row]) for table in tables]
        assert record in offered and record[0] == max(first for first, *_ in offered)
