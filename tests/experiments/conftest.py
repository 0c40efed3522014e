"""The main job's corpus, caches and one undisturbed run, shared by all tests and workers."""

import importlib
import os
import pathlib
import re
import shutil
import sys

import filelock
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from main_job import MainJob, without_repeats, write_corpus

from sparse_dataflow.commands import command_line
from sparse_dataflow.data import cache


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """(folder that all workers share, a lock on it)."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return folder, filelock.FileLock(folder / "main_job.lock")


@pytest.fixture(scope="session")
def job(shared, tmp_path_factory):
    folder, lock = shared
    with lock:
        if not (folder / "corpus").exists():
            write_corpus(folder / "corpus.new")
            (folder / "corpus.new").rename(folder / "corpus")
    logs = tmp_path_factory.mktemp("forks")
    job = MainJob(folder / "corpus", folder / "cache", logs)
    yield job
    job.forks.close()


@pytest.fixture(scope="session")
def undisturbed(job, shared, tmp_path_factory):
    """The folder of a whole run of the tests' plan, started as a user does; not to be changed."""
    folder, lock = shared
    with lock:
        if not (folder / "undisturbed").exists():
            attempt = tmp_path_factory.mktemp("attempt") / "run"
            done = job.process(*job.plan(attempt))
            assert done.returncode == 0, done.stderr
            attempt.rename(folder / "undisturbed")
    return folder / "undisturbed"


@pytest.fixture
def copy(undisturbed, tmp_path):
    """A copy of the undisturbed run that a test may damage."""
    return pathlib.Path(shutil.copytree(undisturbed, tmp_path / "copy"))


@pytest.fixture
def refused(job, tmp_path, monkeypatch, capsys):
    """refused(flag, ..., experiment=NAME) -> what the experiment, "gpt13b_sparse" by default, says
    before it exits with 2; in this process, as a new one takes seconds to start."""
    monkeypatch.setattr(cache, "FOLDER", job.cache / "sparse_dataflow")
    monkeypatch.chdir(tmp_path)

    def refused(*arguments, experiment="gpt13b_sparse"):
        module = importlib.import_module(f"experiments.{experiment}")
        monkeypatch.setattr(sys, "argv", [experiment, *without_repeats(arguments)])
        with pytest.raises(SystemExit) as left:
            command_line.run_main(
                module.main,
                module.__doc__,
                shared=getattr(module, "SHARED", ()),
                options=getattr(module, "Options", None),
                defaults=getattr(module, "DEFAULTS", {}),
            )
        assert left.value.code == 2
        out, err = capsys.readouterr()
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and out == ""
        # One or two sentences: a full stop inside a name is not followed by a space and a capital.
        assert len(re.findall(r"[.;?!] [A-Z]", errors[0])) <= 2, errors[0]
        return errors[0]

    return refused
