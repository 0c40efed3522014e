"""A divergence is told by step and group, and never saved."""

import pytest
from main_job import checkpoint_steps, complaint, rows


@pytest.mark.slow
def test_a_learning_rate_that_diverges(job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    flags = ("--learning_rate=1e30", "--notwin", "--set=run.checkpoint_every=1")
    error = complaint(job.new(folder, *flags))
    assert "sparse: step 1 is not finite (parameters of blocks." in error, error
    assert "Last good checkpoint: none" in error and "lower --learning_rate" in error
    assert checkpoint_steps(folder, "sparse") == []
    assert not (folder / "dense").exists()
    assert [row["step"] for row in rows(folder, "sparse")] == [1]
