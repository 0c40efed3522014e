"""A disk that fills up while training: what was saved stays, and with room the run goes on."""

import subprocess

import pytest
from main_job import assert_same_results, checkpoint_steps, complaint

from sparse_dataflow.commands import run_folder
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import preset

RECORD = RunRecord(
    "toy", ("python",), "today", {}, "a chip", "texts", "0", "0", 512, {"sparse": 1, "dense": 1}
)


def test_a_disk_that_refuses_large_files(job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    error = complaint(job.new(folder, events=[(r"sparse/checkpoints/6\.saving", 1, "full")]))
    assert "checkpoint of step 6 could not be written" in error and "Make room" in error
    assert "the last finished one is step 3" in error
    assert checkpoint_steps(folder, "sparse") == [3]
    assert job.resume(folder).returncode == 0
    assert_same_results(folder, undisturbed)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_disk_without_room(job, undisturbed, small_disk):
    folder = small_disk / "run"
    error = complaint(job.new(folder))
    assert "No space left on device" in error and "ake room" in error
    kept = [checkpoint_steps(folder, name) for name in ("sparse", "dense")]
    assert kept[0]
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    done = job.resume(folder)
    assert done.returncode == 0, done.stderr
    assert f"sparse: resumes after step {kept[0][-1]} of 12" in done.stderr
    assert_same_results(folder, undisturbed)


def test_a_folder_that_refuses_the_config(tmp_path):
    """Its name is taken by a folder, as the system refuses a write for lack of room."""

    class Tokens:
        def save(self, path):
            path.write_text("{}")
            path.with_name("config.json").mkdir()

    with pytest.raises(UserError, match=r"a/b cannot be written"):
        with run_folder.opened("toy", str(tmp_path / "a" / "b"), resume=False) as (folder, _):
            run_folder.start(folder, preset("pico"), RECORD, Tokens())
