"""Every command that a page prints starts, or a reason in words says why no test can start it.

The table of commands is that of the pages; see `documented_commands.LINES`.  `make test` parses and
plans them (`test_planned_commands.py`), and `make test-all` starts them, here and in
`test_wheel.py`.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from documented_commands import LINES, NOT_RUN, ROOT, RUN, TARGETS_OF_CI, split_commands
from planned_commands import spelled_out
from started_commands import COMPUTES, ENDED, REFUSED, RUNS

NOT_STARTED = {
    r"# needs": "another machine, for which test_planned_commands plans it",
    r"^(docker|sbatch|scancel|squeue|kubectl|gcloud)\b": "programs of a cluster",
    r"^(sh launch/tpu_vm\.sh|python launch/gke/render\.py)\b": "a cluster; see tests/launch",
    r"^(pip install|git clone|python -m (venv|build)$)": "the network, or a new environment",
    r"^lm_eval\b": "a model of the reader's; see tests/evaluation/test_lm_eval.py",
    r"^(cd|\.) ": "a shell",
    r"^make( (env|lint)\b.*)?$|^\.ci/run$": "the environment that runs this test",
}
"""Pattern of a line or of a command -> why no test starts it."""

OF_THE_READER = {
    r"--(run|runs|resume|init_from|against|draft|models|teacher|experts)\b": "a run or a model",
    r"\b(training\.teacher|run\.mirror|parallel\.server_dir)=": "a run, or a folder",
    r"--(study|studies)=\S": "a study",
    r"--corpus=\S|--prompts=|--tasks=\S*[./]|data\.(validation|corpus)=": "texts",
    r"^\S+ (export|evaluate|generate|prune|watch)\b": "a run",
    r"^\S+ (compile_plan|schedule_bench)\b": "a compiler for absent chips",
}
"""Pattern of a command -> what it reads that only a reader has; without it, it is refused."""

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def without_variables(command):
    """Returns the words of a command without variables of the environment and "..."."""
    words = shlex.split(command)
    return [w for w in words if w != "..." and not re.fullmatch(r"[A-Z_]+=.*", w)]


def console_words(command):
    """Returns a command as one of the console script; None if it is no experiment."""
    words = spelled_out(without_variables(command))
    if words[:2] == ["python", "-m"] and words[2].startswith("experiments."):
        return ("sparse-dataflow", words[2].partition(".")[2], *words[3:])
    return None


def reason(command, line):
    """Returns why no test starts a command; "" if one does."""
    for pattern, words in NOT_STARTED.items():
        if re.search(pattern, command) or (pattern[0] == "#" and pattern in line):
            return words
    return ""


PRINTED = [(file, line, each) for file, line in LINES for each in split_commands(line)[0]]
COMMANDS = sorted({
    words
    for _, line, command in PRINTED
    if not reason(command, line) and (words := console_words(command))
})  # fmt: skip
FIRST = {words[1]: words for words in reversed(COMMANDS)}
"""Experiment -> the first of its commands."""


def has_a_test(command):
    """Returns whether a command is started here, or named by the table of tests."""
    words = without_variables(command)
    if words[0] == "make":
        known = {*RUN, *(f"make {target}" for target in (*TARGETS_OF_CI, *NOT_RUN))}
        return all(f"make {word}" in known for word in words[1:] if "=" not in word)
    return bool(console_words(command)) or any(word in RUN for word in words)


def test_every_printed_command_is_started_by_a_test_or_has_a_reason():
    without = [
        f"{file}: {command}"
        for file, line, command in PRINTED
        if not reason(command, line) and not has_a_test(command)
    ]
    assert without == []
    assert len(COMMANDS) > 150 and len(FIRST) > 30


def problems(commands, folder, seconds=25, **environment):
    """Starts commands in a folder; returns those that do not start, with the end of their output.

    A command that runs on for `seconds` without an error has started.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    clean |= ENVIRONMENT | {"HOME": str(home)} | environment
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/started_commands.py"), str(folder), str(seconds)],
        input=json.dumps(commands), env=clean, capture_output=True, text=True, timeout=7200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(commands)
    found = {}
    for number, how, text in rows:
        command = shlex.join(commands[number])
        refused = how == REFUSED and any(re.search(each, command) for each in OF_THE_READER)
        if how not in (COMPUTES, ENDED, RUNS) and not refused:
            found[command] = f"{how}: {text}"
    return found


@pytest.mark.slow
def test_a_command_of_each_experiment_starts_outside_of_the_clone(tmp_path):
    assert problems(list(FIRST.values()), tmp_path, PYTHONPATH=str(ROOT)) == {}


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory):
    """A folder with a run under each name that the pages use for one and make with no command."""
    folder = tmp_path_factory.mktemp("reader")
    train = ["train", "--scale=pico", "--block=16", "--steps=2", "--out=RUN"]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "sparse_dataflow", *train],
        cwd=folder, env=environment, check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    lines = "\n".join(map(shlex.join, COMMANDS))
    named = set(re.findall(r"--(?:run|init_from|against|draft)=([\w/]+)", lines))
    for name in named - set(re.findall(r"--out=([\w/]+)", lines)):
        if not (folder / name).exists():
            shutil.copytree(folder / "RUN", folder / name)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("name", FIRST)
def test_every_command_of_an_experiment_starts(name, readers_folder):
    commands = [words for words in COMMANDS if words[1] == name]
    assert problems(commands, readers_folder, PYTHONPATH=str(ROOT)) == {}
