"""The main job's corpus, caches and one undisturbed run, shared by all tests and workers."""

import os
import pathlib
import shutil
import sys

import filelock
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from main_job import MainJob, write_corpus


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """(folder that all workers share, a lock on it)."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return folder, filelock.FileLock(folder / "main_job.lock")


@pytest.fixture(scope="session")
def job(shared):
    folder, lock = shared
    with lock:
        if not (folder / "corpus").exists():
            write_corpus(folder / "corpus.new")
            (folder / "corpus.new").rename(folder / "corpus")
    return MainJob(folder / "corpus", folder / "cache", folder / "compiled")


@pytest.fixture(scope="session")
def undisturbed(job, shared, tmp_path_factory):
    """The folder of a whole run of the tests' plan; not to be changed."""
    folder, lock = shared
    with lock:
        if not (folder / "undisturbed").exists():
            attempt = tmp_path_factory.mktemp("attempt") / "run"
            done = job.new(attempt)
            assert done.returncode == 0, done.stderr
            attempt.rename(folder / "undisturbed")
    return folder / "undisturbed"


@pytest.fixture
def copy(undisturbed, tmp_path):
    """A copy of the undisturbed run that a test may damage."""
    return pathlib.Path(shutil.copytree(undisturbed, tmp_path / "copy"))
