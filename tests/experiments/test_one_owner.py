"""A run folder has one owner, and a run whose folder goes away ends with a message."""

import signal
import time

import psutil
import pytest
from main_job import PICO, PLAN, complaint

STEP = "sparse_dataflow.core.training.loop.run_step"


def stopped_at_step(job, folder, step):
    """A run that has been stopped before this step."""
    corpus = f"--corpus={job.corpus}"
    flags = (*PICO, *PLAN, "--notwin", corpus, f"--out={folder}")
    run = job.start(*flags, calls=[(STEP, step, "SIGSTOP")])
    while psutil.Process(run.pid).status() != psutil.STATUS_STOPPED:
        assert run.returncode is None, run.text
        time.sleep(0.05)
    return run


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.slow
def test_a_running_run_is_neither_resumed_nor_begun_again(job, tmp_path):
    folder = tmp_path / "run"
    run = stopped_at_step(job, folder, 5)
    before = contents(folder)
    words = complaint(job.resume(folder))
    assert f"in use by process {run.pid} on " in words
    assert "holds a run already" in complaint(job.new(folder))
    assert contents(folder) == before
    run.signal(signal.SIGKILL)
    run.wait()
    done = job.resume(folder)
    assert done.returncode == 0 and "resumes after step" in done.stderr, done.stderr
    assert not (folder / ".lock").exists()


def test_of_two_runs_begun_at_once_one_is_refused(job, tmp_path):
    flags = job.plan(tmp_path / "run", "--notwin", "--steps=2")
    runs = [job.start(*flags) for _ in range(2)]
    statuses = sorted((run.wait(), run.stderr) for run in runs)
    assert [status for status, _ in statuses] == [0, 2], statuses
    assert "Traceback" not in statuses[0][1] + statuses[1][1]
    assert "is in use by process" in statuses[1][1] or "holds a run" in statuses[1][1], statuses


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [False, True])
def test_a_folder_that_goes_away_ends_the_run_in_words(job, tmp_path, deleted):
    folder = tmp_path / "run"
    run = stopped_at_step(job, folder, 5)
    folder.rename(tmp_path / "moved")
    if deleted:
        (tmp_path / "moved" / ".lock").unlink()
    run.signal(signal.SIGCONT)
    run.wait()
    assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
    assert "error: The run folder" in run.stderr and "was deleted, moved or taken" in run.stderr
    assert not (folder / "config.json").exists()
    done = job.resume(tmp_path / "moved")
    assert done.returncode == 0, done.stderr
