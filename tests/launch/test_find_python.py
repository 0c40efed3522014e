import configparser
import os
import pathlib
import re
import subprocess
import sys

import pytest
from places import ROOT

SCRIPT = ROOT / "launch" / "find_python.sh"


class Machine:
    """A fake machine: PATH, home folder, and Pythons in them."""

    def __init__(self, folder):
        self.home = folder / "home"
        self.path = [folder / "bin", folder / "other bin"]
        self.root = folder / "root"
        self.variables = {}
        for each in (self.home, *self.path):
            each.mkdir()

    def python(self, place, version, missing="", base=None):
        """Writes a fake Python that reports `version` and the `missing` modules to the probe."""
        return self.script(
            place, f"printf '%s\\n' '{version}' '{missing}' '{base or self._full(place)}'"
        )

    def script(self, place, text):
        path = self._full(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def _full(self, place):
        return place if isinstance(place, pathlib.Path) else self.path[0] / place

    def find(self, *arguments, shell="sh"):
        # PATH has none of the system's folders, only the few tools that the script needs.
        tools = self.home / "tools"
        tools.mkdir(exist_ok=True)
        for tool in ("sh", "sed", "cat"):
            if not (tools / tool).exists():
                bin_folder = next(p for p in ("/bin", "/usr/bin") if os.path.exists(f"{p}/{tool}"))
                (tools / tool).symlink_to(f"{bin_folder}/{tool}")
        variables = {
            "HOME": str(self.home),
            "PATH": ":".join(map(str, [*self.path, tools])),
            "FIND_PYTHON_ROOT": str(self.root),
            **self.variables,
        }
        return subprocess.run(
            [f"/bin/{shell}", str(SCRIPT), *arguments],
            env=variables,
            capture_output=True,
            text=True,
            cwd=self.home,
            timeout=600,
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def selected(result):
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout.removesuffix("\n")


def refused(result):
    assert (result.returncode, result.stdout) == (1, "")
    return result.stderr


def test_the_newest_wins_in_any_place(machine):
    machine.python("python3.11", "3.11")
    machine.python("python3", "3.12")
    newest = machine.python(machine.path[1] / "python3.13", "3.13")
    assert selected(machine.find()) == newest


def test_the_first_of_a_version_wins(machine):
    first = machine.python("python3.12", "3.12")
    machine.python(machine.path[1] / "python3.12", "3.12")
    machine.python(machine.home / ".pyenv/versions/3.12.9/bin/python3", "3.12")
    assert selected(machine.find()) == first


def test_shims_that_cannot_start_are_skipped(machine):
    machine.script("python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    machine.script("python3.12", "echo hello")
    machine.script("python3", "exit 0")
    (machine.path[0] / "python3.11").symlink_to("/nowhere/python3.11")
    usable = machine.python(machine.path[1] / "python3.11", "3.11")
    assert selected(machine.find()) == usable


@pytest.mark.parametrize("missing", ["venv", "ensurepip", "ssl", "venv, ssl"])
def test_a_python_that_cannot_create_environments_is_skipped(machine, missing):
    complete = machine.python("python3.11", "3.11")
    incomplete = machine.python("python3.13", "3.13", missing)
    assert selected(machine.find()) == complete
    os.remove(complete)
    assert f"{incomplete} is Python 3.13 without {missing}\n" in refused(machine.find())


@pytest.mark.parametrize("version", ["2.7", "3.1", "3.10", "3.14", "3.110"])
def test_unsupported_versions_are_skipped(machine, version):
    place = machine.python("python3", version)
    text = refused(machine.find())
    assert f"{place} is Python {version}\n" in text
    assert "found no Python 3.13, 3.12, 3.11" in text
    for words in ("apt install", "brew install", "uv python install", "make PYTHON="):
        assert words in text


def test_no_python_at_all(machine):
    text = refused(machine.find())
    assert "error: found no Python" in text and "Candidates" not in text


@pytest.mark.parametrize(
    "place",
    [
        ".pyenv/versions/3.13.1/bin/python3",
        ".local/share/uv/python/cpython-3.13.1-linux-x86_64-gnu/bin/python3",
        ".local/share/mise/installs/python/3.13/bin/python3",
        ".asdf/installs/python/3.13.1/bin/python3",
        ".local/bin/python3.13",
        "miniconda3/bin/python3",
        "miniforge3/envs/some env/bin/python3",
    ],
)
def test_version_managers_are_searched(machine, place):
    machine.script("python3", "exit 127")
    newest = machine.python(machine.home / place, "3.13")
    assert selected(machine.find()) == newest


@pytest.mark.parametrize(
    "place",
    [
        "opt/homebrew/bin/python3.12",
        "usr/local/bin/python3.12",
        "opt/conda/bin/python3",
        "Library/Frameworks/Python.framework/Versions/3.12/bin/python3",
    ],
)
def test_machine_wide_folders_are_searched(machine, place):
    usable = machine.python(machine.root / place, "3.12")
    assert selected(machine.find()) == usable


def test_pyenv_root_is_searched(machine):
    machine.variables["PYENV_ROOT"] = str(machine.home / "elsewhere")
    place = machine.home / "elsewhere/versions/3.12.1/bin/python3"
    usable = machine.python(place, "3.12")
    assert selected(machine.find()) == usable


def test_inside_an_environment_its_base_is_selected(machine):
    machine.python("python3.13", "3.13", base="/opt/base python/bin/python3.13")
    assert selected(machine.find()) == "/opt/base python/bin/python3.13"


def test_a_version_may_be_requested(machine):
    machine.python("python3.13", "3.13")
    old = machine.python("python3.11", "3.11")
    assert selected(machine.find("3.11")) == old
    machine.variables["PYTHON"] = "python3.11"
    assert selected(machine.find()) == old


def test_a_requested_version_that_is_missing(machine):
    place = machine.python("python3.13", "3.13")
    text = refused(machine.find("3.11"))
    assert "found no Python 3.11 that" in text and f"{place} is Python 3.13" in text


@pytest.mark.parametrize("request_", ["python3.10", "python3.99"])
def test_a_version_that_is_not_supported_is_refused(machine, request_):
    machine.python("python3.13", "3.13")
    machine.variables["PYTHON"] = request_
    assert "is not supported; legal: 3.13 3.12 3.11" in refused(machine.find())


def test_a_named_python_is_the_only_one_considered(machine):
    machine.python("python3.13", "3.13")
    mine = machine.python(machine.home / "my python", "3.11")
    machine.variables["PYTHON"] = mine
    assert selected(machine.find()) == mine
    machine.python(machine.home / "my python", "3.9")
    text = refused(machine.find())
    assert f"error: PYTHON={mine} cannot be used." in text and "is Python 3.9" in text
    machine.variables["PYTHON"] = "/nowhere/python"
    assert "/nowhere/python is not a program" in refused(machine.find())


def test_odd_paths_are_harmless(machine):
    usable = machine.python(machine.path[1] / "python3.12", "3.12")
    (machine.path[0] / "python3.13").mkdir()
    machine.path[:0] = ["", "/nowhere/*", "relative"]
    assert selected(machine.find()) == usable


def test_the_real_probe_finds_the_real_python(machine):
    machine.path[0] = pathlib.Path(sys.base_prefix) / "bin"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    place = pathlib.Path(selected(machine.find(version)))
    assert place.resolve() == pathlib.Path(sys._base_executable).resolve()


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_other_shells_agree(machine, shell):
    if not os.path.exists(f"/bin/{shell}"):
        pytest.skip(f"no {shell} here")
    machine.script("python3.13", "exit 127")
    usable = machine.python("python3", "3.12")
    assert selected(machine.find(shell=shell)) == usable


def test_the_versions_equal_those_of_the_metadata():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", config["options"]["python_requires"]).groups()
    expected = [f"3.{minor}" for minor in range(int(high) - 1, int(low) - 1, -1)]
    script = SCRIPT.read_text(encoding="utf-8")
    assert re.search(r"^supported='(.*)'$", script, re.M)[1].split() == expected
    named = re.findall(r":: Python :: (3\.\d+)", config["metadata"]["classifiers"])
    assert sorted(named) == sorted(expected)
