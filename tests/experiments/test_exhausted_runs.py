"""A run that may have no more memory or threads ends with a message, and keeps saved steps."""

import re

import pytest
from fault_records import EXHAUSTED, Record
from main_job import assert_same_results, complaint

WRITING = "sparse_dataflow.core.checkpoint.named_arrays.start_writing"
STEP = "sparse_dataflow.core.training.loop.run_step"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "shortage"),
    [
        ((WRITING, 1), "no memory"),
        pytest.param((WRITING, 2), "no threads", marks=pytest.mark.nightly),
        pytest.param((STEP, 5), "no memory", marks=pytest.mark.nightly),
        pytest.param((STEP, 5), "no threads", marks=pytest.mark.nightly),
    ],
)
def test_an_exhausted_run_ends_in_words_and_goes_on(job, undisturbed, tmp_path, call, shortage):
    """At its first save, at a later one and in a step."""
    record = Record(EXHAUSTED)
    done = job.new(tmp_path / "run", calls=[(*call, shortage)])
    # What is short of memory often lacks it for the stack of a thread first.
    assert re.search("too little memory|more threads", complaint(done))
    again = job.resume(tmp_path / "run")
    assert again.returncode == 0, again.stderr
    assert_same_results(tmp_path / "run", undisturbed)
    record.note('2, "may have no more threads"', None, None, None, True)
