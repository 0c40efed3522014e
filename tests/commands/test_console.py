"""The console script starts the same experiments as `python -m experiments.NAME`."""

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest
from marks import some
from places import ROOT

from sparse_dataflow.commands import experiment_modules
from sparse_dataflow.files import console


def run(*words):
    command = [sys.executable, "-m", "sparse_dataflow", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_version_is_that_of_the_package():
    done = run("--version")
    assert done.stdout == f"sparse-dataflow {importlib.metadata.version('sparse_dataflow')}\n"


def test_without_a_command_all_are_listed():
    done = run()
    assert done.returncode == 0 and done.stderr == ""
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    others = set(experiment_modules.experiments()) - set(console.EVERYDAY.values())
    assert listed == {*console.EVERYDAY, *others}
    assert all(sentence.strip() for sentence in experiment_modules.experiments().values())


@pytest.mark.parametrize(
    "words",
    some({"": ((),), "--version": (("--version",),), "help": (("train", "--help"),)}, "help"),
)
def test_a_page_that_nobody_reads_to_its_end_is_no_fault(words):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "sparse_dataflow", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=300)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "word", some(["train", "chip-report", "chip_report", "iso_flop", "plan"], "chip_report")
)
def test_help_has_commands_of_the_same_kind(word):
    done = run(word, "--help")
    experiment = console.EVERYDAY.get(word, word)
    short = {module: name for name, module in console.EVERYDAY.items()}.get(experiment, experiment)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: sparse-dataflow {short} [")
    assert "python -m experiments" not in done.stdout


@pytest.mark.parametrize(
    "word",
    some(
        ["tran", "../train", "__init__", "--steps=3", "", "a" * 999, "\x1b[0m"],
        "../train",
        "\x1b[0m",
    ),
)
def test_an_unknown_command_is_refused_in_a_sentence(word):
    done = run(word)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: unknown command") and len(done.stderr) < 300
    assert done.stderr.count("\n") == 1 and "\x1b" not in done.stderr


def test_a_command_refuses_flags_as_its_module_does():
    both = [
        run("train", "--densty=0.5"),
        subprocess.run(
            [sys.executable, "-m", "experiments.gpt13b_sparse", "--densty=0.5"],
            capture_output=True, text=True, timeout=300,
        ),
    ]  # fmt: skip
    assert both[0].stderr == both[1].stderr and both[0].returncode == both[1].returncode == 2


def test_a_page_shows_each_command_as_everybody_has_it():
    templates = list((ROOT / "sparse_dataflow/reporting").glob("*.jinja"))
    shown = [
        s for t in templates for s in re.findall(r"\{\{ ([^}]*\.command\b[^}]*)\}\}", t.read_text())
    ]
    assert len(shown) >= 5 and all(each.endswith("| command ") for each in shown)


@pytest.mark.parametrize(
    "written, everybody",
    [
        ("python -m experiments.gpt13b_sparse --steps=3", "sparse-dataflow train --steps=3"),
        ("python -m sparse_dataflow.experiments.evaluate", "sparse-dataflow evaluate"),
        ("python -m experiments.iso_flop", "sparse-dataflow iso_flop"),
        ("sparse-dataflow plan --chips=8", "sparse-dataflow plan --chips=8"),
        ("python mine.py --steps=3", "python mine.py --steps=3"),
    ],
)
def test_a_saved_command_is_shown_as_everybody_has_it(written, everybody):
    assert console.with_commands(written) == everybody
