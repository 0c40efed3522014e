"""Environments in which a run cannot do what it is asked: it ends with a message."""

import importlib
import json
import os
import pkgutil
import re
import resource
import subprocess
import sys

import pytest
from main_job import PICO, ROOT

from sparse_dataflow.commands import command_line, request
from sparse_dataflow.core.config import settings
from sparse_dataflow.data.local_files import LocalSource
from sparse_dataflow.files.errors import UserError, in_words
from sparse_dataflow.hardware import chips
from sparse_dataflow.runs.run_config import RunConfig, RunSettings

OUT = next(s for s in settings.settings(RunSettings) if s.name == "out")


def process(job, *arguments, environment=None, program="experiments.gpt13b_sparse", **options):
    """A process of its own, as a user starts it."""
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        env=job.environment | (environment or {}),
        cwd=job.corpus.parent,
        capture_output=True,
        text=True,
        timeout=600,
        **options,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def plan(job, folder, *arguments):
    return (*PICO, "--steps=2", "--notwin", f"--corpus={job.corpus}", f"--out={folder}", *arguments)


@pytest.mark.parametrize("home", ["~", "~root"])
def test_a_tilde_is_expanded_for_every_path_alike(home, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    place = os.path.expanduser(home)
    assert OUT.parse(f"{home}/x") == request.START["resume"].parse(f"{home}/x") == f"{place}/x"
    for path in ("data.corpus", "run.init_from", "parallel.server_dir"):
        setting = settings.by_path(RunConfig)[path]
        assert setting.parse(f"{home}/x") == f"{place}/x"
    assert OUT.parse("./~/x") == "./~/x"


NAMES_A_PATH = re.compile(r"\b(folder|file|HTML|CSV|run)\b", re.IGNORECASE)
NO_PATHS = {"scale", "variant", "checkpoint", "twin", "seed", "coordinator", "chips"}
NO_PATHS |= {"tasks", "hardware"}
"""Texts whose help names a run or a file; the second are lists, expanded where they are read."""


def test_every_flag_that_names_a_file_or_folder_is_a_path():
    import experiments

    modules = [importlib.import_module(f"experiments.{m.name}") for m in
               pkgutil.iter_modules(experiments.__path__) if not m.ispkg]  # fmt: skip
    options = [module.Options for module in modules if hasattr(module, "Options")]
    flags = [*settings.by_path(RunConfig).values(), *request.START.values()]
    flags += [flag for option in options for flag in settings.settings(option)]
    texts = [flag for flag in flags if flag.type is str and not flag.choices]
    assert len(texts) > 30
    for flag in texts:
        if NAMES_A_PATH.search(flag.help) and flag.name.rpartition(".")[2] not in NO_PATHS:
            assert flag.path, flag.name


def test_a_tilde_inside_a_list_and_in_a_flagfile_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    chip = 'name = "mine"\nbfloat16_tflops = 9.0\nmemory_gb = 8.0\nbandwidth_gb_s = 7.0\n'
    (tmp_path / "mine.toml").write_text(chip)
    assert chips.lookup("~/mine.toml").name == "mine"
    (tmp_path / "flags").write_text("--steps=7\n")
    [parsed] = command_line.arguments(["x", "--flagfile=~/flags"], ("steps",), None)
    assert parsed.changes == {"training.steps": 7}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("~nosuchuser/x", "no such home folder"),
        ("a" * 256, "255 bytes"),
        ("x/" + "é" * 128, "255 bytes"),
        ("deep/" * 1000, "3,900"),
        ("a\0b", "NUL"),
        ("caf\udce9", "UTF-8"),
    ],
)
def test_a_path_that_no_file_system_has_is_refused_at_once(text, words):
    for setting in (OUT, request.START["resume"]):
        with pytest.raises(ValueError, match=words):
            setting.parse(text)


def test_a_file_whose_name_is_not_utf_8_is_read(tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w") as file:
        file.write("some text")
    [document] = LocalSource(tmp_path).documents()
    assert document.id == r"caf\xe9.txt" and document.id.encode()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(24, "Too many open files", "/x"),
            "/x: Too many open files; allow more open files",
        ),
        (OSError(28, "No space left on device"), "No space left on device; make room"),
        (OSError(13, "Permission denied", "/x"), "permission"),
        (MemoryError(), "too little memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes"), "too little memory"),
        (ValueError("a mistake of the code"), ""),
        (KeyError("kind"), ""),
    ],
)
def test_errors_of_the_machine_are_words_and_those_of_the_code_are_not(error, words):
    assert words in in_words(error) and bool(words) == bool(in_words(error))


def test_without_a_home_folder_the_cache_is_named(job, monkeypatch):
    from sparse_dataflow.data import cache

    def expanduser(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache.Path, "expanduser", expanduser)
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        cache.resolved("~/.cache/sparse_dataflow")


NOBODY = """
import pwd, runpy, sys
def getpwuid(number):
    raise KeyError(number)
pwd.getpwuid = getpwuid
runpy.run_module("experiments.gpt13b_sparse", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_user_without_a_home_folder(job, tmp_path):
    """As a container runs with a number that no passwd file lists."""
    environment = {n: v for n, v in job.environment.items() if n not in ("HOME", "XDG_CACHE_HOME")}
    command = [sys.executable, "-c", NOBODY, *plan(job, tmp_path / "run")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert (
        "error: This user has no home folder for the data cache; set XDG_CACHE_HOME" in done.stderr
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("descriptors", [10, 12, 16, 24, 63, 64])
def test_few_file_descriptors(job, tmp_path, descriptors):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    done = process(job, *plan(job, tmp_path / "run"), preexec_fn=limit)
    assert done.returncode == (0 if descriptors >= 64 else 2), done.stderr
    assert descriptors >= 64 or "may open" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "gone", ["full", "reader left", pytest.param("closed", marks=pytest.mark.nightly)]
)
def test_a_log_that_cannot_be_written_ends_nothing(job, tmp_path, gone):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "experiments.gpt13b_sparse", *plan(job, folder)]
    options = {"env": job.environment, "cwd": job.corpus.parent, "stdout": subprocess.DEVNULL}
    if gone == "full":
        with open("/dev/full", "w") as full:
            status = subprocess.run(command, stderr=full, **options).returncode
    elif gone == "closed":
        status = subprocess.run(command, preexec_fn=lambda: os.close(2), **options).returncode
    else:
        reader, writer = os.pipe()
        os.close(reader)
        status = subprocess.run(command, stderr=writer, **options).returncode
        os.close(writer)
    assert status == 0
    assert (folder / "report.html").exists()
    assert json.loads((folder / "config.json").read_text())["training"]["steps"] == 2
    assert str(ROOT) in job.environment["PYTHONPATH"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", pytest.param("goodput.jsonl", marks=pytest.mark.nightly)]
)
def test_a_named_pipe_or_a_folder_in_a_run_is_not_waited_for(job, copy, name, tmp_path):
    path = copy / ("sparse/" + name if "metrics" in name else name)
    path.unlink()
    os.mkfifo(path)
    done = process(job, f"--resume={copy}")
    assert done.returncode in (0, 2)
    path.unlink()
    path.mkdir()
    export = (f"--run={copy}", f"--to={tmp_path / 'exported'}", "--variant=sparse")
    done = process(job, *export, program="experiments.export")
    assert done.returncode == (2 if "metrics" in name else 0), done.stderr
    if "metrics" in name:
        path.rmdir()
        path.write_text('{"kind": "eval"}\n{"more": 1}\n{"kind": "final", "step": 3, "loss": []}\n')
        done = process(job, *export, program="experiments.export")
        assert done.returncode == 0, done.stderr


def test_weights_that_are_a_named_pipe_are_refused(refused, tmp_path):
    import shutil

    model = shutil.copytree(ROOT / "tests" / "interchange" / "gpt2", tmp_path / "gpt2")
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    error = refused(f"--init_from={model}", "--steps=2")
    assert "model.safetensors is not" in error and "not a regular file" in error
