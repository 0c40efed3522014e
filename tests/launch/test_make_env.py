"""`make env` with a made-up Python, whose pip does what a test tells it to."""

import configparser
import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
# A make that runs these tests would pass its own settings on.
VARIABLES = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
FAKE = """#!/bin/sh
here={folder}
case "$*" in
    "-m venv --clear "*)
        for env; do :; done
        rm -rf "$env" && mkdir -p "$env/bin" && touch "$env/pyvenv.cfg"
        cp "$0" "$env/bin/python"
        echo venv >>"$here/log" ;;
    "-m pip install "*)
        echo pip >>"$here/log"
        . "$here/pip" ;;
    *) printf '3.13\\n\\n%s\\n' "$0" ;;
esac
"""


class Clone:
    """A clone with a fake Python beside it."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "launch").mkdir()
        for name in ("Makefile", "setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        for script in (ROOT / "launch").glob("*.sh"):
            shutil.copy(script, folder / "launch")
        self.python = folder / "fake python"
        self.python.write_text(FAKE.format(folder=f"'{folder}'"))
        self.python.chmod(0o755)
        self.pip("true")

    def pip(self, text):
        (self.folder / "pip").write_text(text + "\n")

    def start(self, *arguments, **options):
        (self.folder / "log").write_text("")
        return subprocess.Popen(
            ["make", "env", f"PYTHON={self.python}", *arguments],
            cwd=self.folder,
            env=VARIABLES,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def make(self, *arguments):
        """(exit status, what was done, stdout, stderr)"""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=600)
        return process.returncode, (self.folder / "log").read_text().split(), out, err

    def change_metadata(self):
        # Past any file system's rounding of times.
        later = time.time() + 5
        os.utime(self.folder / "setup.cfg", (later, later))


@pytest.fixture
def clone(tmp_path):
    if not shutil.which("make"):
        pytest.skip("no make here")
    folder = tmp_path / "a clone"
    folder.mkdir()
    return Clone(folder)


def test_it_is_made_once(clone):
    status, done, out, err = clone.make()
    assert (status, done, err) == (0, ["venv", "pip"], "")
    assert out.startswith("making .venv with Python 3.13")
    assert clone.make() == (0, [], "", "")


def test_versions_are_those_of_ci_only_where_asked_for(clone):
    clone.pip('echo "$*" >>"$here/words"')
    clone.make()
    clone.change_metadata()
    clone.make("LOCKED=1")
    free, locked = (clone.folder / "words").read_text().splitlines()
    assert "constraints" not in free and " -c launch/../constraints.txt -e " in locked


def test_the_locked_versions_are_of_every_supported_python():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert not any(word in line for line in lines for word in ("://", "--", "@"))
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    wanted = config["options"]["install_requires"] + config["options.extras_require"]["dev"]
    wanted = [Requirement(w) for w in wanted.splitlines() if w and not w.lstrip().startswith("#")]
    versions = {}
    for python in ("3.11", "3.12", "3.13"):
        machine = {"python_version": python, "python_full_version": f"{python}.1"}
        machine |= {"sys_platform": "linux", "platform_machine": "x86_64"}
        here = [p for p in pins if p.marker is None or p.marker.evaluate(machine)]
        held = {canonicalize_name(p.name): str(next(iter(p.specifier)).version) for p in here}
        assert len(held) == len(here)  # None twice.
        for need in wanted:
            assert need.specifier.contains(held[canonicalize_name(need.name)]), (python, need)
        versions[python] = held["jax"]
    assert versions["3.11"] == "0.10.2" and versions["3.12"] == versions["3.13"] != "0.10.2"


def test_a_changed_setup_cfg_brings_it_up_to_date(clone):
    clone.make()
    clone.change_metadata()
    status, done, out, _ = clone.make()
    assert (status, done) == (0, ["pip"]) and "up to date" in out


def test_pips_error_is_seen_and_the_environment_made_anew(clone):
    clone.pip("echo 'ERROR: no such version' >&2; exit 1")
    status, done, _, err = clone.make()
    assert status != 0 and done == ["venv", "pip"]
    assert "ERROR: no such version\n" in err and "error: pip could not install" in err
    clone.pip("true")
    assert clone.make()[:2] == (0, ["venv", "pip"])


def test_a_failed_update_keeps_the_environment_and_is_tried_again(clone):
    clone.make()
    clone.change_metadata()
    clone.pip("exit 1")
    assert clone.make()[:2] == (2, ["pip"])
    clone.pip("true")
    assert clone.make()[:2] == (0, ["pip"])


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_half_made_environment_is_made_anew(clone, update, sent):
    if update:
        clone.make()
        clone.change_metadata()
    # Like pip, the fake ends with status 1 on Ctrl-C.
    clone.pip('trap "exit 1" INT; touch "$here/half"; for i in 1 2 3 4 5 6 7 8 9; do sleep 1; done')
    reset = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = clone.start(start_new_session=True, **reset)
    for _ in range(6000):
        if (clone.folder / "half").exists():
            break
        time.sleep(0.05)
    os.killpg(process.pid, sent)
    process.communicate(timeout=600)
    assert process.returncode != 0
    clone.pip("true")
    assert clone.make()[:2] == (0, ["venv", "pip"])


def test_an_environment_whose_python_is_gone_is_made_anew(clone):
    clone.make()
    python = clone.folder / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/nowhere/python3.13")
    assert clone.make()[:2] == (0, ["venv", "pip"])


def test_environments_stand_side_by_side(clone):
    clone.make()
    assert clone.make("VENV=.venv311")[:2] == (0, ["venv", "pip"])
    assert clone.make()[:2] == (0, [])


def test_a_folder_that_is_no_environment_is_never_emptied(clone):
    thesis = clone.folder / "work" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("chapter 1")
    status, done, _, err = clone.make("VENV=work")
    assert status != 0 and done == [] and thesis.read_text() == "chapter 1"
    assert "work exists and is not an environment" in err


def test_no_python_is_told_in_words(clone):
    clone.python.unlink()
    status, done, _, err = clone.make()
    assert status != 0 and done == []
    assert "cannot be used" in err and "What to do" in err


def test_help_lists_every_target(clone):
    page = subprocess.run(
        ["make"], cwd=clone.folder, env=VARIABLES, capture_output=True, text=True
    ).stdout
    for target in ("env", "demo", "test", "nightly", "lint", "bench", "clean", "help"):
        assert f"\n  {target} " in page
    assert not (clone.folder / ".venv").exists()
