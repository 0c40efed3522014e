"""The wheel has every file of package and experiments; `make package` installs and runs it."""

import ast
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

from sparse_dataflow.files import console
from sparse_dataflow.interchange import model_card

ROOT = pathlib.Path(__file__).parents[1]
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


def sources():
    """Yields every file of the packages except caches and benchmark results."""
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
def outside(wheel, tmp_path):
    """outside(*arguments) -> the end of Python with the wheel's packages alone, in a folder of its
    own."""
    alone, work = tmp_path / "alone", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(alone)
    work.mkdir()
    (alone / "sitecustomize.py").write_text(WITHOUT_CLONE.replace("{places!r}", repr({str(ROOT)})))

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


@pytest.mark.slow
def test_every_command_of_the_pages_is_one_of_the_wheel(outside):
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.md"), ROOT / "README.md"]
    text = "\n".join(page.read_text() for page in pages)
    names = sorted(set(re.findall(rf"\b{console.SCRIPT} ([a-z][a-z0-9_-]+)", text)))
    assert len(names) > 20
    find = "import sys, importlib; from sparse_dataflow.__main__ import _experiment, commands; "
    find += "[commands.experiment(_experiment(name)) for name in sys.argv[1:]]"
    done = outside("-c", find, *names)
    assert done.returncode == 0, done.stderr


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
