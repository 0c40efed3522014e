"""Runs with a second copy of their checkpoints, and the loss of the first one."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from checkpoint_states import restored_step, saved, small_state
from fault_records import MIRROR_KILLS, MIRRORED, Record
from main_job import PICO, assert_same_results, checkpoint_steps, complaint
from storage_faults import lost

from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.mirror import copied_to

SAVE_9 = r"first/sparse/checkpoints/9\.saving"
COPY_9 = r"second/sparse/checkpoints/9\.saving"


def lose_disk_in_a_save(folder: Path, seed: int) -> bool:
    """A run whose first disk is lost before a random file operation of a save goes on to the same
    bits; returns whether that was in the middle of the save."""
    draw = random.Random(seed)
    first, second = folder / "first" / "checkpoints", folder / "second" / "checkpoints"
    steps = draw.randint(1, 3)
    checkpoints = saved(first, range(1, steps + 1), keep=2, mirror=copied_to(second))
    with lost(first, draw.randint(0, 45)) as away:
        with contextlib.suppress(UserError):
            checkpoints.save(steps + 1, small_state(steps + 1), {"position": steps + 1})
            checkpoints.wait()
        in_the_middle = bool(away)
    shutil.rmtree(first, ignore_errors=True)
    comes_back = draw.choice(["never", "as it was", "damaged"])
    if away and comes_back != "never":
        away[0].rename(first)
        if comes_back == "damaged":
            for path in [p for p in first.rglob("*") if p.is_file()]:
                os.truncate(path, path.stat().st_size // 2)
    step = restored_step(first, mirror=copied_to(second))
    assert steps <= step <= steps + 1, (step, steps, comes_back)
    saved(first, [step + 1], keep=2, mirror=copied_to(second))
    assert restored_step(first) == restored_step(second) == step + 1
    return in_the_middle


@pytest.fixture
def no_waits(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.0,) * 5)


@pytest.mark.parametrize("seed", range(3))
def test_a_disk_lost_in_the_middle_of_a_save(no_waits, tmp_path, seed):
    lose_disk_in_a_save(tmp_path, seed)


@pytest.mark.nightly
def test_a_hundred_disks_lost_in_the_middle_of_a_save(no_waits, tmp_path):
    record, seed, lost_in_the_middle = Record(MIRRORED), 0, 0
    while lost_in_the_middle < 100:
        lost_in_the_middle += lose_disk_in_a_save(tmp_path / str(seed), seed)
        shutil.rmtree(tmp_path / str(seed))
        seed += 1
    record.note("2, then the mirror is continued; 100 times", None, 1, None, True)


def mirrored_plan(job, folder, *flags):
    return job.plan(folder / "first", f"--set=run.mirror={folder / 'second'}", *flags)


def until_stopped(run):
    while psutil.Process(run.pid).status() != psutil.STATUS_STOPPED:
        assert run.returncode is None, run.text
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_whose_disk_is_lost_in_a_save_goes_on_from_its_mirror(job, undisturbed, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run = job.start(*mirrored_plan(job, tmp_path), events=[(SAVE_9, 3, "SIGSTOP")])
    until_stopped(run)
    first.rename(tmp_path / "away")
    run.signal(signal.SIGCONT)
    run.wait()
    assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
    assert f"--resume={second}" in run.stderr, run.stderr
    shutil.rmtree(first, ignore_errors=True)
    assert "in use" not in (done := job.resume(second)).stderr
    assert done.returncode == 0, done.stderr
    # Of step 3 where the copy of step 6 was under way.
    assert re.search(r"sparse: resumes after step [36] of 12", done.stderr), done.stderr
    assert "was the mirror of a run" in done.stderr
    assert_same_results(second, undisturbed)


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_damaged_is_restored_from_its_mirror(
    job, undisturbed, tmp_path
):
    """Which a kill while a checkpoint was copied has left without the newest one."""
    first, second = tmp_path / "first", tmp_path / "second"
    done = job.run(*mirrored_plan(job, tmp_path), events=[(COPY_9, 2, "SIGKILL")])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint_steps(second, "sparse")[-1] == 6
    for variant in ("sparse", "dense"):
        for path in (first / variant / "checkpoints").glob("*/state/d/*"):
            os.truncate(path, path.stat().st_size // 2)
    done = job.resume(first, f"--set=run.mirror={second}")
    assert done.returncode == 0 and "Restoring the checkpoint of step 6 from" in done.stderr, done
    assert "resumes after step 6 of 12" in done.stderr
    assert_same_results(first, undisturbed)
    for variant in ("sparse", "dense"):
        assert checkpoint_steps(second, variant)[-1] == 12
    config = json.loads((second / "config.json").read_text())
    assert config["run"]["mirror"] == str(second)


@pytest.mark.nightly
def test_kills_while_a_mirror_is_written_and_read_end_at_the_same_bits(
    job, undisturbed, tmp_path, pytestconfig
):
    """Before random operations on the mirror; now and then the run folder is lost as well."""
    first, second = tmp_path / "first", tmp_path / "second"
    record, draw = Record(MIRROR_KILLS), random.Random(0)
    ended = lost_folders = 0
    for _ in range(pytestconfig.getoption("--kills") // 3):
        name = draw.choice(["SIGKILL", "SIGKILL", "SIGTERM"])
        event = (r"/second/", draw.randint(1, 120), name)
        if (first / "run.json").exists():
            run = job.start(f"--resume={first}", f"--set=run.mirror={second}", events=[event])
        else:
            run = job.start(*mirrored_plan(job, tmp_path), events=[event])
        status = run.wait()
        assert status in (0, 75, -signal.SIGKILL) and "Traceback" not in run.stderr, run.text
        ended += status != 0
        if status == 0:
            assert_same_results(first, undisturbed)
            shutil.rmtree(first)
            shutil.rmtree(second)
        elif draw.random() < 0.2 and checkpoint_steps(second, "sparse"):
            lost_folders += 1
            shutil.rmtree(first)
            done = job.resume(second)
            assert done.returncode == 0, done.stderr
            assert_same_results(second, undisturbed)
            shutil.rmtree(second)
        elif not (first / "run.json").exists():
            shutil.rmtree(first, ignore_errors=True)
            shutil.rmtree(second, ignore_errors=True)
    assert ended
    ending = f"-9 or 75, {ended} times; the run folder lost as well, {lost_folders} times"
    record.note(ending, None, None, None, True)


def test_mirrors_that_cannot_be(job, refused, tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    (mine / "config.json").write_text("mine")
    plan = (*PICO, "--steps=2", f"--corpus={job.corpus}", f"--out={run}")
    assert "may not replace (config.json)" in refused(*plan, f"--set=run.mirror={mine}")
    assert "is the run folder" in refused(*plan, f"--set=run.mirror={run}")
    assert "inside the other" in refused(*plan, f"--set=run.mirror={run / 'second'}")
    assert "name another with run.mirror" in refused(*plan, "--set=run.mirror=/proc/none")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (mine / "config.json").read_text() == "mine"


def test_the_mirror_of_another_run_is_refused(job, undisturbed, copy, tmp_path):
    other = Path(shutil.copytree(undisturbed, tmp_path / "other"))
    record = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(record | {"date": "another day"}))
    before = sorted(other.rglob("*"))
    error = complaint(job.resume(copy, f"--set=run.mirror={other}"))
    assert f"{other} holds a run already" in error and sorted(other.rglob("*")) == before
