"""Runs at an address of an object store: real processes, a real server, real kills."""

import json
import shutil
import signal
import time

import psutil
import pytest
from main_job import PICO, assert_same_results, checkpoint_steps, complaint
from object_store import object_store

OUT = "s3://runs/first"
SECOND_UPLOAD = (r"sparse/checkpoints/\d+/extra\.json", 2)
"""The middle of the second copy of a checkpoint: a slow store may not get each."""


@pytest.fixture(scope="module")
def server():
    with object_store() as store:
        yield store


@pytest.fixture
def store(server):
    """The server with an empty bucket "runs"."""
    server.make_bucket("runs")
    yield server
    if "runs" in server.buckets():
        server.remove_bucket("runs")


class Machine:
    """A machine with caches of its own, from which the store is reached."""

    def __init__(self, job, store, cache):
        self._job, self._store, self.cache = job, store, cache

    def start(self, *arguments, **options):
        environment = self._store.environment | {"XDG_CACHE_HOME": str(self.cache)}
        return self._job.start(*arguments, environment=environment, **options)

    def run(self, *arguments, **options):
        run = self.start(*arguments, **options)
        run.wait()
        return run

    def new(self, *flags, **options):
        return self.run(*self._job.plan(OUT, *flags), **options)

    def work_folder(self):
        (folder,) = (self.cache / "sparse_dataflow" / "runs").iterdir()
        return folder


@pytest.fixture
def machines(job, store, tmp_path):
    """Two machines that share nothing but the store."""
    return [Machine(job, store, tmp_path / name) for name in ("here", "there")]


def copied_steps(store, variant="sparse"):
    keys = [key.split("/") for key in store.keys("runs", f"first/{variant}/checkpoints/")]
    return sorted(int(key[3]) for key in keys if key[-1] == "manifest.json")


@pytest.mark.slow
def test_a_run_killed_in_an_upload_goes_on_elsewhere_to_the_bits_of_a_local_run(
    machines, store, undisturbed, tmp_path
):
    first, second = machines
    killed = first.new(events=[(*SECOND_UPLOAD, "SIGKILL")])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (step,) = copied_steps(store)
    done = second.run(f"--resume={OUT}")
    assert done.returncode == 0, done.stderr
    assert f"sparse: resumes after step {step} of 12" in done.stderr
    assert f"copied to {OUT}" in done.stderr
    assert_same_results(second.work_folder(), undisturbed)
    # What lies in the store is the run, read by a library that is not ours.
    store.download("runs", "first/", tmp_path / "copy")
    assert_same_results(tmp_path / "copy", undisturbed)
    assert "first/.lock" not in store.keys("runs")


@pytest.mark.slow
def test_a_run_killed_in_an_upload_goes_on_from_what_its_own_machine_has(
    machines, store, undisturbed
):
    first = machines[0]
    first.new(events=[(*SECOND_UPLOAD, "SIGKILL")])
    (copied,), saved = copied_steps(store), checkpoint_steps(first.work_folder(), "sparse")[-1]
    assert saved > copied
    done = first.run(f"--resume={OUT}")
    assert done.returncode == 0, done.stderr
    assert f"sparse: resumes after step {saved} of 12" in done.stderr
    assert_same_results(first.work_folder(), undisturbed)
    assert copied_steps(store)[-1] == 12


@pytest.mark.slow
def test_a_bucket_that_disappears_loses_nothing(machines, store, undisturbed):
    first = machines[0]
    run = first.start(*first._job.plan(OUT), events=[(*SECOND_UPLOAD, "SIGSTOP")])
    while psutil.Process(run.pid).status() != psutil.STATUS_STOPPED:
        assert run.returncode is None, run.text
        time.sleep(0.05)
    store.remove_bucket("runs")
    run.signal(signal.SIGCONT)
    run.wait()
    assert "could not be copied to s3://runs/first/sparse" in run.stderr
    error = complaint(as_done(run))
    assert "The run is whole in" in error and "bucket does not exist" in error
    folder = first.work_folder()
    assert str(folder) in error
    assert_same_results(folder, undisturbed)
    store.make_bucket("runs")
    done = first.run(f"--resume={OUT}")
    assert done.returncode == 0, done.stderr
    assert copied_steps(store)[-1] == copied_steps(store, "dense")[-1] == 12
    assert "first/report.html" in store.keys("runs")


def as_done(run):
    """A fork that ended as `complaint` takes it."""
    run.wait()
    return run


@pytest.mark.slow
def test_a_new_run_never_replaces_one_at_its_address(machines, store, undisturbed):
    first, second = machines
    for path in undisturbed.rglob("*"):
        if path.is_file() and "checkpoints" not in path.parts:
            store.write("runs", f"first/{path.relative_to(undisturbed)}", path.read_bytes())
    before = store.keys("runs")
    assert f"--resume={OUT} to resume it" in complaint(as_done(first.new()))
    store.write("runs", "other/mine", b"mine")
    refused = second.run(*second._job.plan("s3://runs/other"))
    assert "may not replace (mine)" in complaint(refused)
    assert store.keys("runs") == sorted([*before, "other/mine"])


@pytest.mark.slow
def test_a_start_that_was_killed_while_it_said_what_it_is_leaves_no_part_of_itself(machines, store):
    first = machines[0]
    killed = first.new(
        "--steps=2", "--twin=no", events=[(r"runs-first-\w+/run\.json$", 2, "SIGKILL")]
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "first/config.json" not in store.keys("runs")
    shutil.rmtree(first.work_folder())
    store.write("runs", "first/run.json", b"of the start before")
    done = first.new("--steps=2", "--twin=no", "--seed=1")
    assert done.returncode == 0, done.stderr
    assert json.loads(store.read("runs", "first/run.json"))["experiment"] == "gpt13b_sparse"


@pytest.mark.slow
def test_a_folder_of_another_run_at_the_same_address_is_kept(machines, store, undisturbed):
    first, second = machines
    first.new("--steps=2", "--twin=no")
    store.remove_bucket("runs")
    store.make_bucket("runs")
    assert second.new("--steps=2", "--twin=no", "--seed=1").returncode == 0
    done = first.run(f"--resume={OUT}")
    assert done.returncode == 0 and "held another run; it is now" in done.stderr, done.stderr
    folders = sorted((first.cache / "sparse_dataflow" / "runs").iterdir())
    seeds = [json.loads((f / "config.json").read_text())["training"]["seed"] for f in folders]
    assert seeds == [1, 0]


@pytest.mark.slow
def test_a_local_run_is_mirrored_at_an_address_and_goes_on_from_there(
    machines, store, undisturbed, tmp_path
):
    first, second = machines
    out = tmp_path / "local"
    killed = first.run(
        *first._job.plan(out, f"--set=run.mirror={OUT}"), events=[(*SECOND_UPLOAD, "SIGKILL")]
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    shutil.rmtree(out)
    done = second.run(f"--resume={OUT}")
    assert done.returncode == 0, done.stderr
    assert "sparse: resumes after step" in done.stderr
    assert_same_results(second.work_folder(), undisturbed)


PLAN = (*PICO, "--steps=2")


def test_addresses_that_cannot_be_written_are_refused_before_any_work(
    refused, store, monkeypatch, tmp_path
):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert "bucket does not exist" in refused(*PLAN, "--out=s3://nowhere/run")
    assert "bucket does not exist" in refused(*PLAN, "--set=run.mirror=s3://nowhere/run")
    assert "no such object or bucket" in refused("--resume=s3://nowhere/run")
    assert "s3://runs/none is not a run" in refused("--resume=s3://runs/none")
    assert "names no bucket" in refused(*PLAN, "--out=s3://")
    assert "legal: gs://" in refused(*PLAN, "--out=gs:/bucket/run")
    assert "copied there alone" in refused(*PLAN, f"--out={OUT}", "--set=run.mirror=s3://runs/b")
    for flag, experiment in (("run", "generate"), ("out", "iso_flop"), ("to", "export")):
        error = refused(f"--{flag}=s3://runs/none", experiment=experiment)
        assert "legal: a path on this machine" in error
    assert not list(tmp_path.glob("*s:*")) and store.keys("runs") == []


def test_an_address_without_credentials_is_refused(refused, store, monkeypatch):
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    error = refused(*PLAN, f"--out={OUT}")
    s3fs.S3FileSystem.clear_instance_cache()
    assert "Unable to locate credentials" in error and "credentials in the environment" in error
    assert store.keys("runs") == []
