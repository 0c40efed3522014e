"""A power cut: a file system then has what was flushed to the disk, and may have nothing else."""

import os
import shutil

import pytest
from fault_records import POWER_CUT, Record
from main_job import assert_same_results, checkpoint_steps


def cut(folder, flushed, last):
    """Leaves what was on disk when `last` was flushed: no later checkpoint, and of each other file
    its flushed bytes."""
    lines = [line.rsplit(" ", 2) for line in flushed.read_text().splitlines()]
    end = next(n for n, (path, *_) in enumerate(lines) if path.endswith(last)) + 1
    sizes = {int(inode): int(size) for _, inode, size in lines[:end]}
    for path, *_ in lines[end:]:
        saving, _, name = path.rpartition("/")
        if name == ".manifest.json":
            shutil.rmtree(saving.removesuffix(".saving"), ignore_errors=True)
    for path in folder.rglob("*"):
        if path.is_file() and "checkpoints" not in path.relative_to(folder).parts:
            status = path.stat()
            os.truncate(path, min(status.st_size, sizes.get(status.st_ino, 0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "variant", "step"),
    [
        (r"sparse/checkpoints/9\.saving", "sparse", 6),
        pytest.param(r"sparse/checkpoints/6\.saving", "sparse", 3, marks=pytest.mark.nightly),
        pytest.param(r"dense/checkpoints/12\.saving", "dense", 9, marks=pytest.mark.nightly),
        pytest.param(r"report\.json", "dense", 12, marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_outlives_a_power_cut_with_its_rows_and_its_run(
    job, undisturbed, tmp_path, moment, variant, step
):
    record, folder, flushed = Record(POWER_CUT), tmp_path / "run", tmp_path / "flushed"
    killed = job.new(folder, events=[(moment, 1, "SIGKILL")], flushed=flushed)
    assert killed.returncode == -9 and checkpoint_steps(folder, variant)[-1] == step
    cut(folder, flushed, f"{variant}/checkpoints/{step}.saving/.manifest.json")
    again = job.resume(folder)
    assert again.returncode == 0, again.stderr
    assert "missing" not in again.stderr and f"resumes after step {step} of 12" in again.stderr
    assert_same_results(folder, undisturbed)
    record.note("-9", None, None, None, True)
