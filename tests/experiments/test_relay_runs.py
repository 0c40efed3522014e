"""The main job through the relay: the whole executor's results, and exact resumes."""

import shutil

import numpy as np
import pytest
from main_job import PICO, PLAN, assert_same_results, rows
from ports import free_port

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import TEMPORARY
from sparse_dataflow.relay import server_files
from sparse_dataflow.runs.run_config import SIZES

SHORT = ("--twin=no", "--executor=relay")


def losses(folder):
    return [row["loss"] for row in rows(folder, "sparse") if row["kind"] == "train"]


def done(process):
    assert process.returncode == 0, process.stderr
    return process


@pytest.fixture(scope="module")
def relayed(job, tmp_path_factory):
    """A run of 12 steps whose layouts change, in host memory."""
    folder = tmp_path_factory.mktemp("relayed") / "run"
    process = done(job.new(folder, *SHORT, "--evolution=rigl", "--set=evolution.every=4"))
    assert "relay plan" in process.stderr and "relay measured" in process.stderr
    return folder


@pytest.mark.nightly  # Every day one run does its first steps in each executor, below.
def test_the_relay_is_the_whole_executor_to_rounding(job, relayed, tmp_path):
    folder = tmp_path / "run"
    done(job.new(folder, "--twin=no", "--evolution=rigl", "--set=evolution.every=4"))
    np.testing.assert_allclose(losses(relayed), losses(folder), rtol=1e-4)
    evaluated = [
        [row["loss"] for row in rows(run, "sparse") if row["kind"] == "final"]
        for run in (relayed, folder)
    ]
    np.testing.assert_allclose(*evaluated, rtol=1e-4)


@pytest.mark.slow
def test_killed_in_a_step_it_goes_on_from_the_one_before(job, relayed, tmp_path):
    """Between checkpoints, which are at 3, 6, 9 and 12; the layouts change after 4 and 8.

    The record of a step is opened and renamed, beginning with that of step 0.
    """
    folder, server = tmp_path / "run", tmp_path / "server"
    plan = (
        *SHORT,
        "--evolution=rigl",
        "--set=evolution.every=4",
        f"--set=parallel.server_dir={server}",
    )
    killed = job.new(folder, *plan, events=[(r"\.server\.json", 11, "SIGKILL")])
    assert killed.returncode == -9, killed.stderr
    at = f"--set=parallel.server_dir={server}"
    killed = job.resume(folder, at, events=[(r"\.server\.json", 9, "SIGKILL")])
    assert killed.returncode == -9 and "resumes after step 4 of 12" in killed.stderr
    assert "resumes after step 8 of 12" in done(job.resume(folder, at)).stderr
    assert_same_results(folder, relayed)


@pytest.mark.slow
def test_killed_with_layouts_that_stay_it_goes_on_from_the_step_before(job, tmp_path):
    """Programs are then specialised to the groups of the layouts."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    done(job.new(whole, *SHORT))
    plan = (*SHORT, f"--set=parallel.server_dir={tmp_path / 'server'}")
    killed = job.new(folder, *plan, events=[(r"\.server\.json", 11, "SIGKILL")])
    assert killed.returncode == -9, killed.stderr
    assert "resumes after step 4 of 12" in done(job.resume(folder, plan[-1])).stderr
    assert_same_results(folder, whole)


def two(job, *arguments, events):
    """What two processes said, the second of which meets the events."""
    address = f"--set=parallel.coordinator=127.0.0.1:{free_port()}"
    started = [
        job.start(
            address,
            "--set=parallel.processes=2",
            f"--set=parallel.process={n}",
            *arguments,
            events=events if n else (),
        )
        for n in range(2)
    ]
    statuses = [process.wait() for process in started]
    told = [process.stderr for process in started]
    assert statuses == [TEMPORARY, -9], told
    return told


@pytest.mark.slow
def test_two_processes_go_on_from_a_step_that_both_have_and_one_from_the_last(
    job, relayed, tmp_path
):
    """The first may have kept a step more than the second, which is killed before its record."""
    folder, server = tmp_path / "run", tmp_path / "server"
    plan = (*PICO, *PLAN, *SHORT, "--evolution=rigl", "--set=evolution.every=4")
    new = (
        *plan,
        f"--corpus={job.corpus}",
        f"--out={folder}",
        f"--set=parallel.server_dir={server}",
    )
    two(job, *new, events=[(r"\.server\.json", 11, "SIGKILL")])
    told, _ = two(job, f"--resume={folder}", new[-1], events=[(r"\.server\.json", 9, "SIGKILL")])
    assert "resumes after step 4 of 12" in told
    told = done(job.resume(folder, new[-1])).stderr
    assert "resumes after step 8 of 12" in told or "resumes after step 9 of 12" in told
    assert len(losses(folder)) == 12
    np.testing.assert_allclose(losses(folder), losses(relayed), rtol=1e-4)


@pytest.mark.slow
def test_a_run_may_change_its_executor(job, relayed, tmp_path):
    """The same checkpoint: begun as one program, ended by the relay."""
    folder = tmp_path / "run"
    plan = ("--twin=no", "--evolution=rigl", "--set=evolution.every=4")
    killed = job.new(folder, *plan, events=[(r"sparse/checkpoints/9\.saving", 1, "SIGKILL")])
    assert killed.returncode == -9, killed.stderr
    again = done(job.resume(folder, "--executor=relay", "--set=parallel.stash=host"))
    assert "resumes after step 6 of 12" in again.stderr
    np.testing.assert_allclose(losses(folder), losses(relayed), rtol=1e-4)


@pytest.mark.slow
def test_the_depth_is_the_same_after_a_resume(job, tmp_path):
    plan = ("--twin=no", "--executor=relay", "--set=parallel.depth_schedule=drop:0.4")
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    done(job.new(whole, *plan))
    killed = job.new(folder, *plan, events=[(r"sparse/checkpoints/9\.saving", 1, "SIGKILL")])
    assert killed.returncode == -9, killed.stderr
    done(job.resume(folder))
    assert_same_results(folder, whole)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ["--set=parallel.stash=host"],
            "parallel.executor=auto, which has no such setting; legal: parallel.executor=relay",
        ),
        (["--executor=relay", "--set=parallel.depth_schedule=grow:2"], "legal: constant, drop:P"),
        (
            ["--executor=relay", "--set=parallel.server_dir=s", "--evolution=gradual"],
            "legal with it: static",
        ),
        (["--executor=relay", "--scale=175b", "--block=64"], "of host memory with these flags"),
        (
            ["--executor=relay", "--set=parallel.server_dir=/proc/none"],
            "name another with parallel.server_dir",
        ),
        (["--executor=relay", "--set=parallel.server_dir=taken"], "may not replace (sparse)"),
        (["--executor=relay", "--set=parallel.server_dir=etc"], "may not replace (passwd)"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_compiled(
    job, refused, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.setattr("sparse_dataflow.commands.job.build.compile_programs", None)
    (tmp_path / "taken/sparse").mkdir(parents=True)
    (tmp_path / "taken/sparse/letter.txt").touch()
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").touch()
    before = sorted(tmp_path.rglob("*"))
    plan = (*PICO, *PLAN, f"--corpus={job.corpus}", f"--out={tmp_path / 'run'}")
    assert words in refused(*plan, *arguments)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_too_small_for_all_models_is_told_before_anything_is_compiled(
    job, refused, tmp_path, monkeypatch
):
    """For both twins at once: 24 bytes a parameter each."""
    monkeypatch.setattr("sparse_dataflow.commands.job.build.compile_programs", None)
    model = SIZES["pico"]
    both = sum(
        24 * cost.parameter_count(m)
        for m in (model, model.with_linears(LinearSpec("block_sparse", density=0.25, block=16)))
    )
    disk = shutil._ntuple_diskusage(2**40, 2**40, both - 1)
    monkeypatch.setattr(server_files.shutil, "disk_usage", lambda path: disk)
    plan = (*PICO, *PLAN, f"--corpus={job.corpus}", f"--out={tmp_path / 'run'}")
    relay = ("--executor=relay", f"--set=parallel.server_dir={tmp_path / 'server'}", "--twin=yes")
    said = refused(*plan, *relay)
    assert "GiB and its disk has" in said and "larger disk" in said
