"""`make env` with a fake Python; each test sets what its pip does."""

import configparser
import os
import shutil
import signal
import subprocess
import time

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT

# A make that runs these tests would pass its settings on through MAKEFLAGS.
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
    """A clone of this project with a fake Python."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "launch").mkdir()
        for name in ("Makefile", "setup.cfg", "setup.py", "pyproject.toml"):
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
        """Returns (exit status, logged actions, stdout, stderr)."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=600)
        return process.returncode, (self.folder / "log").read_text().split(), out, err

    def change_metadata(self):
        # 5 seconds are more than any file system rounds times by.
        later = time.time() + 5
        os.utime(self.folder / "setup.cfg", (later, later))


@pytest.fixture
def clone(tmp_path):
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    folder = tmp_path / "a clone"
    folder.mkdir()
    return Clone(folder)


def test_it_is_created_once(clone):
    status, done, out, err = clone.make()
    assert (status, done, err) == (0, ["venv", "pip"], "")
    assert out.startswith("creating .venv with Python 3.13")
    assert clone.make() == (0, [], "", "")


def test_locked_versions_are_used_only_on_request(clone):
    clone.pip('echo "$*" >>"$here/words"')
    clone.make()
    clone.change_metadata()
    clone.make("LOCKED=1")
    free, locked = (clone.folder / "words").read_text().splitlines()
    assert "constraints" not in free and " -c launch/../constraints.txt -e " in locked


def test_locked_versions_exist_for_every_supported_python():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert not any(word in line for line in lines for word in ("://", "--", "@"))
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = config["options.extras_require"]
    lines = config["options"]["install_requires"] + extras["train"] + extras["dev"]
    lines = [line for line in lines.splitlines() if line and not line.lstrip().startswith("#")]
    requirements = [Requirement(line) for line in lines]
    requirements = [each for each in requirements if each.name != "sparse_dataflow"]
    versions = {}
    for python in ("3.11", "3.12", "3.13"):
        machine = {"python_version": python, "python_full_version": f"{python}.1"}
        machine |= {"sys_platform": "linux", "platform_machine": "x86_64"}
        valid = [p for p in pins if p.marker is None or p.marker.evaluate(machine)]
        locked = {canonicalize_name(p.name): str(next(iter(p.specifier)).version) for p in valid}
        assert len(locked) == len(valid)  # No package has two versions.
        for need in requirements:
            assert need.specifier.contains(locked[canonicalize_name(need.name)]), (python, need)
        versions[python] = locked["jax"]
    assert versions["3.11"] == "0.10.2" and versions["3.12"] == versions["3.13"] != "0.10.2"


def test_a_changed_setup_cfg_updates_it(clone):
    clone.make()
    clone.change_metadata()
    status, done, out, _ = clone.make()
    assert (status, done) == (0, ["pip"]) and "updating .venv to setup.cfg" in out


def test_pips_error_is_shown_and_the_environment_created_again(clone):
    clone.pip("echo 'ERROR: no such version' >&2; exit 1")
    status, done, _, err = clone.make()
    assert status != 0 and done == ["venv", "pip"]
    assert "ERROR: no such version\n" in err and "error: pip could not install" in err
    clone.pip("true")
    assert clone.make()[:2] == (0, ["venv", "pip"])


def test_a_failed_update_keeps_the_environment_and_is_repeated(clone):
    clone.make()
    clone.change_metadata()
    clone.pip("exit 1")
    assert clone.make()[:2] == (2, ["pip"])
    clone.pip("true")
    assert clone.make()[:2] == (0, ["pip"])


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_incomplete_environment_is_created_again(clone, update, sent):
    if update:
        clone.make()
        clone.change_metadata()
    # The fake ends with status 1 on Ctrl-C, as pip does.
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


def test_an_environment_without_its_python_is_created_again(clone):
    clone.make()
    python = clone.folder / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/nowhere/python3.13")
    assert clone.make()[:2] == (0, ["venv", "pip"])


def test_two_environments_are_independent(clone):
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


def test_a_missing_python_is_explained(clone):
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
