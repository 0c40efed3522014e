"""Every fenced command of the README runs as printed, in order, in a new environment of a clone.

What takes minutes is made smaller without another line: `make demo` by the variable ARGS of the
environment, and `sparse-dataflow train` by SMALLER, which is added to the printed line. The folder
~/notes is made. GPU and TPU installs are printed with "# needs" and are not run.
"""

import os
import pathlib
import subprocess

import pytest
from documented_commands import ROOT, fenced_commands

README = ROOT / "README.md"
TINY = "--scale=pico --block=16 --notwin --steps=2"
SMALLER = {
    "--corpus=~/notes --minutes=20 --density=0.25": "--corpus=~/notes --minutes=0.02 "
    "--density=0.25 --scale=pico --block=16 --notwin",
}


def commands():
    """The fenced lines that need no accelerator."""
    return [line for line in fenced_commands(README) if "# needs" not in line]


def test_what_is_made_smaller_is_in_the_readme():
    text = README.read_text()
    assert all(printed in text for printed in SMALLER)
    assert commands()[:2] == ["make demo", ". .venv/bin/activate"]
    assert len(commands()) > 5 and any("--resume" in line for line in commands())


@pytest.mark.nightly
def test_every_command_of_the_readme_runs_in_order(tmp_path):
    clone, home = tmp_path / "clone", tmp_path / "home"
    subprocess.run(["git", "clone", "-q", "--local", ROOT, clone], check=True, timeout=300)
    (home / "notes").mkdir(parents=True)
    for number in range(30):
        text = "".join(f"Note {number}: line {line} says {line * number}.\n" for line in range(300))
        (home / "notes" / f"{number}.txt").write_text(text)
    lines = []
    for line in commands():
        for printed, smaller in SMALLER.items():
            line = line.replace(printed, smaller)
        lines += [f"echo '+ {pathlib.Path(line).name[:60]}' >&2", line]
    environment = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("VIRTUAL_ENV", "PYTHON", "JAX", "XDG", "PYTEST"))
    } | {"HOME": str(home), "ARGS": TINY, "JAX_PLATFORMS": "cpu"}  # fmt: skip
    script = "\n".join(["set -euo pipefail", *lines])
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True,
        timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(list((clone / "runs").glob("*/report.html"))) >= 3
