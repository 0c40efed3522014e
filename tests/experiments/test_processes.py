"""The main job on several processes over loopback: the same training, and ends with a message."""

import json
import re
import shutil
import signal
import time

import numpy as np
import pytest
from main_job import PICO, PLAN, TIMEOUT, arrays, checkpoint_steps, complaint, rows
from marks import some
from object_store import object_store
from ports import free_port

from sparse_dataflow.commands import address_runs
from sparse_dataflow.files import manifest
from sparse_dataflow.files.errors import UserError


def start(job, processes, numbers, *arguments, more=None, happening=None):
    """Some of a run's processes, started; `more` are flags of one process by its number, and
    `happening` options of `job.start`."""
    address = f"--set=parallel.coordinator=127.0.0.1:{free_port()}"
    return [
        job.start(
            address,
            f"--set=parallel.processes={processes}",
            f"--set=parallel.process={n}",
            *arguments,
            *(more or {}).get(n, ()),
            **(happening or {}).get(n, {}),
        )
        for n in numbers
    ]


def ended(started):
    """The processes, once all have ended."""
    for process in started:
        process.wait()
    return started


def new(job, folder):
    return (*PICO, *PLAN, "--notwin", f"--corpus={job.corpus}", f"--out={folder}")


def numbers_of(folder):
    """{(kind, step): loss} of a run."""
    return {
        (row["kind"], row["step"]): row["loss"] for row in rows(folder, "sparse") if "loss" in row
    }


def assert_like_one_process(folder, undisturbed):
    mine, right = numbers_of(folder), numbers_of(undisturbed)
    assert mine.keys() == right.keys()
    np.testing.assert_allclose(list(mine.values()), list(right.values()), rtol=2e-4)
    ours, theirs = arrays(folder, "sparse", 12), arrays(undisturbed, "sparse", 12)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert array.shape == ours[name].shape
        if name.startswith("params") and name.endswith("values"):
            np.testing.assert_allclose(ours[name], array, atol=0.02 * np.abs(array).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "mesh"),
    [
        (1, "auto"),
        pytest.param(4, "fsdp:2,tensor:2", marks=pytest.mark.nightly),
        pytest.param(4, "stage:2,data:2", marks=pytest.mark.nightly),
    ],
)
def test_two_processes_train_like_one_and_as_many_go_on(
    job, undisturbed, tmp_path, processes, mesh
):
    folder = tmp_path / "run"
    done = ended(start(job, 2, (0, 1), *new(job, folder), "--mesh=data:2"))
    assert [p.returncode for p in done] == [0, 0], [p.stderr for p in done]
    assert "Traceback" not in done[0].stderr + done[1].stderr
    assert "report:" in done[0].stderr and "loss" not in done[1].stderr
    assert (folder / "report.html").exists()
    assert_like_one_process(folder, undisturbed)
    assert 6 in checkpoint_steps(folder, "sparse")
    for step in checkpoint_steps(folder, "sparse"):
        if step > 6:
            shutil.rmtree(folder / "sparse" / "checkpoints" / str(step))
    flags = (f"--resume={folder}", f"--mesh={mesh}")
    if processes == 1:
        done = [job.run(*flags)]
    else:
        done = ended(start(job, processes, range(processes), *flags))
    assert [p.returncode for p in done] == [0] * processes, [p.stderr for p in done]
    assert "resumes after step 6 of 12" in done[0].stderr
    assert_like_one_process(folder, undisturbed)


@pytest.mark.slow
def test_two_processes_begin_with_the_weights_of_a_run_like_one(job, undisturbed, tmp_path):
    flags = ("--notwin", f"--corpus={job.corpus}", f"--init_from={undisturbed}", "--steps=3")
    lone, folder = tmp_path / "lone", tmp_path / "run"
    done = job.run(*flags, f"--out={lone}")
    assert done.returncode == 0, done.stderr
    done = ended(start(job, 2, (0, 1), *flags, f"--out={folder}", "--mesh=data:2"))
    assert [p.returncode for p in done] == [0, 0], [p.stderr for p in done]
    mine, right = numbers_of(folder), numbers_of(lone)
    assert mine.keys() == right.keys()
    np.testing.assert_allclose(list(mine.values()), list(right.values()), rtol=2e-4)


def test_when_one_process_is_killed_the_others_end_in_words(job, tmp_path):
    folder = tmp_path / "run"
    endless = ("--steps=100000", "--set=run.checkpoint_every=100000", "--set=run.eval_every=100000")
    started = start(job, 2, (0, 1), *new(job, folder), *endless, "--mesh=data:2")
    metrics, deadline = folder / "sparse" / "metrics.jsonl", time.monotonic() + TIMEOUT
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert started[0].returncode is None and time.monotonic() < deadline
        time.sleep(0.2)
    started[1].signal(signal.SIGKILL)
    first, _ = ended(started)
    assert first.returncode != 0
    assert re.search(r"^error: process 1 ended: it gave no reason", first.stderr, re.M)


def test_all_hear_that_the_folder_is_of_others(job, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("mine")
    for process in ended(start(job, 2, (0, 1), *new(job, folder), "--mesh=data:2")):
        assert process.returncode == 2, process.stderr
        assert re.search(r"^error: .*may not replace \(tokenizer\.json\)", process.stderr, re.M)
        assert "Traceback" not in process.stderr
    assert [path.read_text() for path in folder.iterdir()] == ["mine"]


@pytest.mark.slow
def test_processes_of_one_host_train_at_an_address(job, tmp_path):
    flags = [*new(job, "s3://runs/first"), "--mesh=data:2", "--steps=3"]
    with object_store() as store:
        store.make_bucket("runs")
        environment = store.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        happening = {n: {"environment": environment} for n in (0, 1)}
        for process in ended(start(job, 2, (0, 1), *flags, happening=happening)):
            assert process.returncode == 0, process.stderr
        store.download("runs", "first", tmp_path / "copy")
    assert manifest.verify(tmp_path / "copy" / "sparse" / "checkpoints" / "3")["step"] == 3


def test_hosts_that_share_no_folder_are_refused_an_address(tmp_path):
    with pytest.raises(UserError, match="hosts that share no folder"):
        address_runs.refuse_unshared(tmp_path, "s3://runs/first")
    (tmp_path / ".lock").touch()
    address_runs.refuse_unshared(tmp_path, "s3://runs/first")


@pytest.mark.parametrize("one", some([0, 1], 1))
def test_a_signal_to_one_process_that_compiles_ends_all_with_75(job, tmp_path, one):
    """JAX's runtime would catch SIGTERM itself."""
    stuck = ("sparse_dataflow.commands.job.build.compile_programs", 1, "SIGTERM in a long call")
    happening = {one: {"calls": [stuck]}}
    flags = (*new(job, tmp_path / "run"), "--mesh=data:2")
    done = ended(start(job, 2, (0, 1), *flags, happening=happening))
    assert [process.returncode for process in done] == [75, 75], [p.stderr for p in done]
    assert "stopped: ended by SIGTERM" in done[one].stderr
    assert f"process {one} ended" in done[1 - one].stderr


def test_a_process_that_never_joins_is_named(job, tmp_path):
    flags = (*new(job, tmp_path / "run"), "--set=parallel.join_timeout=1")
    [done] = ended(start(job, 2, (0,), *flags))
    assert "Process 1 of 2 did not join within 1 seconds" in complaint(done)
    assert not (tmp_path / "run").exists()


def test_other_flags_on_another_host_are_refused_on_both(job, tmp_path):
    flags, token = new(job, tmp_path / "run"), {"environment": {"SPARSE_DATAFLOW_TOKEN": "secret"}}
    started = start(job, 2, (0, 1), *flags, more={1: ["--seed=7"]}, happening={0: token, 1: token})
    for done in ended(started):
        error = complaint(done)
        assert "Process 1 has other settings than process 0: --seed is 7 there and 0 here" in error
        assert "hash of all flags" in error
    assert not (tmp_path / "run").exists()


def test_a_coordinator_that_is_not_reached(job, tmp_path):
    [done] = ended(
        start(job, 2, (1,), *new(job, tmp_path / "run"), "--set=parallel.join_timeout=1")
    )
    assert "was not reached within 1 seconds (Connection refused)" in complaint(done)


def test_a_mesh_that_does_not_fit_is_refused_on_every_process(job, tmp_path):
    flags = (*new(job, tmp_path / "run"), "--mesh=tensor:3")
    for done in ended(start(job, 2, (0, 1), *flags)):
        assert "a mesh of 3 devices, and there are 2" in complaint(done)
    assert json.dumps(sorted(p.name for p in tmp_path.iterdir())) == "[]"
