"""The wheel has every file of package and experiments; `make package` installs and runs it."""

import ast
import os
import re
import subprocess
import sys
import zipfile

import pytest
from places import ROOT
from test_started_commands import COMMANDS, FIRST, problems

from sparse_dataflow.files import console
from sparse_dataflow.interchange import model_card

PACKAGES = ("sparse_dataflow", "experiments")
BUILD_FILES = ("setup.cfg", "setup.py", "pyproject.toml", "README.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy because the build creates folders in its source."""
    copy = tmp_path_factory.mktemp("source")
    files = [p for p in ROOT.iterdir() if p.name in BUILD_FILES]
    files += [ROOT / "LICENSE", *sources()]
    for path in files:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (copy / "build").exists()  # It would be what `python -m build` imports there.
    return next(out.glob("*.whl"))


RESULTS_READ = ("serving_cost*/[rs]*s.json*", "structure_pico/study.toml")
"""Results that a command reads: runs.jsonl and settings.json of the law of shape_search, and the
study of structure_search."""


def sources():
    """Yields every file of the packages, without caches and results that no command reads."""
    for pattern in RESULTS_READ:
        yield from sorted(ROOT.glob(f"experiments/results/{pattern}"))
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.is_file() and not {"__pycache__", "results"} & {*path.relative_to(ROOT).parts}:
                yield path


def test_the_wheel_has_exactly_the_files_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {str(path.relative_to(ROOT)) for path in sources()}
    inside = {f"sparse_dataflow/{name}" for name in expected if name.startswith("experiments/")}
    assert files == {name for name in expected if not name.startswith("experiments/")} | inside


WITHOUT_CLONE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
sys.path[:] = [place for place in sys.path if place not in {places!r}]
"""


@pytest.fixture
def alone(wheel, tmp_path):
    """A folder with the wheel's packages, which as PYTHONPATH hides those of the clone."""
    alone = tmp_path / "alone"
    zipfile.ZipFile(wheel).extractall(alone)
    (alone / "sitecustomize.py").write_text(WITHOUT_CLONE.replace("{places!r}", repr({str(ROOT)})))
    (tmp_path / "work").mkdir()
    return alone


@pytest.fixture
def outside(alone, tmp_path):
    """outside(*arguments) -> the end of Python with the wheel's packages alone, in a folder of its
    own."""
    work = tmp_path / "work"

    def outside(*arguments):
        environment = os.environ | {"PYTHONPATH": str(alone), "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=work, env=environment)

    return outside


@pytest.mark.slow
def test_a_pattern_of_your_own_and_printed_commands_run_from_the_wheel_alone(outside, tmp_path):
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "BUILD.md").read_text(), re.S)
    (tmp_path / "work" / "mine.py").write_text(example)
    refused = outside("mine.py", "--pattern=every_fourth")
    assert refused.returncode == 2 and "every_third" in refused.stderr, refused.stderr
    printed = [model_card._NO_TASK, console.command("gpt13b_dense"), console.command("export")]
    names = re.findall(rf"{console.SCRIPT} ([a-z0-9_-]+)", " ".join(printed))
    assert names == ["evaluate", "gpt13b_dense", "export"]
    for name in names:
        done = outside("-m", "sparse_dataflow", name, "--help")
        assert done.returncode == 0 and f"usage: {console.SCRIPT} " in done.stdout, done.stderr
    where = outside("-c", "import sparse_dataflow; print(sparse_dataflow.__file__)")
    assert str(ROOT) not in where.stdout


def test_experiments_import_each_other_by_relative_imports():
    """In a wheel there is no package `experiments`."""
    absolute = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "experiments").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("exper"))
        or (isinstance(node, ast.Import) and node.names[0].name.startswith("experiments"))
    ]
    assert absolute == []


@pytest.mark.slow
def test_a_command_of_each_experiment_starts_from_the_wheel_alone(alone, tmp_path):
    assert problems(list(FIRST.values()), tmp_path / "work", PYTHONPATH=str(alone)) == {}


@pytest.mark.nightly
def test_every_printed_command_starts_from_the_wheel_alone(alone, tmp_path):
    assert problems(COMMANDS, tmp_path / "work", PYTHONPATH=str(alone)) == {}


def texts_of(path):
    """Returns the strings of a module that are no docstrings."""
    tree = ast.parse(path.read_text())
    alone = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in alone]
    return [n.value for n in constants if isinstance(n.value, str)]


def test_no_sentence_of_the_package_names_a_module_that_a_wheel_lacks():
    homes = {"console.py", "command_line.py"}  # Those that know how a command is written.
    clone_only = {
        "sparse_dataflow": r"\bexperiments\.[a-z]",
        "experiments": r"-m experiments\.[a-z]",
    }
    sentences = {
        path.name: text
        for package, module in clone_only.items()
        for path in (ROOT / package).rglob("*.py")
        if path.name not in homes
        for text in texts_of(path)
        if re.search(module, text)
    }
    assert not sentences
