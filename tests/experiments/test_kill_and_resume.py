"""A run that is killed, and gone on with, ends at the same bits as one that is left alone."""

import random
import re
import signal
import subprocess
import sys
import time

import pytest
from main_job import PICO, PLAN, assert_same_results, checkpoint_steps, rows

START = r"config\.json"
FIRST_SAVE = r"sparse/checkpoints/3\.saving"
LAST_DENSE_SAVE = r"dense/checkpoints/12\.saving"
REPORT = r"report\.json"


def killed(done):
    assert done.returncode == -signal.SIGKILL, (done.returncode, done.stderr)
    return done


def assert_little_is_repeated(done, before):
    """Each variant went on after its newest whole checkpoint of before."""
    told = re.findall(r"(\w+): resumes after step (\d+) of 12", done.stderr)
    # A kill may come before the second variant has printed its line.
    assert told and {name: int(step) for name, step in told}.items() <= before.items()


def saved(folder):
    return {name: max(checkpoint_steps(folder, name), default=0) for name in ("sparse", "dense")}


@pytest.mark.slow
def test_kills_at_the_joints_of_a_run(job, refused, undisturbed, tmp_path):
    folder = tmp_path / "run"
    killed(job.new(folder, events=[(START, 2, "SIGKILL")]))
    assert not (folder / "config.json").exists()
    assert "not a run folder" in refused(f"--resume={folder}")
    killed(job.new(folder, events=[(FIRST_SAVE, 1, "SIGKILL")]))
    assert saved(folder) == {"sparse": 0, "dense": 0}
    assert len(rows(folder, "sparse")) == 3
    killed(job.resume(folder, events=[(LAST_DENSE_SAVE, 1, "SIGKILL")]))
    before = saved(folder)
    assert before["dense"] == 9
    done = killed(job.resume(folder, events=[(REPORT, 1, "SIGKILL")]))
    assert_little_is_repeated(done, before)
    assert saved(folder) == {"sparse": 12, "dense": 12}
    done = job.resume(folder)
    assert done.returncode == 0, done.stderr
    assert_same_results(folder, undisturbed)


@pytest.mark.slow
def test_kills_at_random_file_operations(job, undisturbed, tmp_path):
    go_on_through_kills(job, tmp_path / "run", random.Random(2), kills=2)
    assert_same_results(tmp_path / "run", undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_many_kills_at_random_file_operations(job, undisturbed, tmp_path, seed):
    go_on_through_kills(job, tmp_path / "run", random.Random(seed), kills=10)
    assert_same_results(tmp_path / "run", undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_many_kills_at_random_times(job, undisturbed, tmp_path, seed):
    folder, draw = tmp_path / "run", random.Random(seed)
    start = [sys.executable, "-m", "experiments.gpt13b_sparse"]
    for _ in range(12):
        arguments = [*PICO, *PLAN, f"--corpus={job.corpus}", f"--out={folder}"]
        if (folder / "config.json").exists():
            arguments = [f"--resume={folder}"]
        process = subprocess.Popen(
            [*start, *arguments], cwd=tmp_path, env=job.environment, stderr=subprocess.DEVNULL
        )
        time.sleep(draw.uniform(4, 16))
        process.kill()
        process.wait()
    done = job.resume(folder) if (folder / "config.json").exists() else job.new(folder)
    assert done.returncode == 0, done.stderr
    assert_same_results(folder, undisturbed)


def go_on_through_kills(job, folder, draw, kills):
    """Runs to the end, killed `kills` times before a random operation in the variants' folders."""
    inside = re.escape(str(folder)) + "/(sparse|dense)/"
    go_on = job.new
    for _ in range(kills):
        before = saved(folder)
        done = go_on(folder, events=[(inside, draw.randint(1, 60), "SIGKILL")])
        if done.returncode == 0:  # There were fewer operations left.
            break
        killed(done)
        if go_on == job.resume and "resumes after" in done.stderr:
            assert_little_is_repeated(done, before)
        go_on = job.resume
    done = job.resume(folder)
    assert done.returncode == 0, done.stderr
