"""Every command in the documentation is one, and is run by a test or says what it needs."""

import ast
import importlib
import importlib.util
import itertools
import pathlib
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from absl import flags as absl_flags
from documented_commands import NOT_RUN, RUN

from experiments import command_line, flags

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(page for where in ("", "docs/", "launch/") for page in ROOT.glob(f"{where}*.md"))
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
# Clusters and clouds, whose commands need "# needs ..." beside them.
ELSEWHERE = ("docker", "sbatch", "scancel", "squeue", "kubectl", "gcloud")
# Not ours: what gets the source, and what the reader's own file is called.
OTHERS = ("git clone", "cd ", "python mine.py", "python -m build", "python -m venv")
IN_CI = re.findall(r"^ *make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.M)


def joined(text):
    """With lines that are continued on the next one in one."""
    return re.sub(r" *\\\n *", " ", text)


def fenced(page):
    """The lines of the fenced blocks without a language."""
    text = joined(page.read_text(encoding="utf-8"))
    for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S):
        yield from (line.strip() for line in block.splitlines() if line.strip())


def inline(page):
    """Commands between backticks."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for span in re.findall(r"`([^`]+)`", text.replace("\n", " ")):
        # A cluster's own tools in a sentence of its own page need no remark.
        if re.match(r"(python|make|sh|\.ci/run)( |$)", span):
            yield span


def refused(line):
    """Why a command is none; empty where it is one."""
    command, _, remark = line.partition(" #")
    for part in re.split(r" (?:\||&&) ", command):
        if reason := _refused(part.strip(), remark):
            return reason
    return ""


def _refused(command, remark):
    if command.startswith(OTHERS):
        return ""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    if words[0] in ELSEWHERE:
        return "" if "needs" in remark else "say what it needs"
    if words[0] == "make":
        named = [word for word in words[1:] if "=" not in word]
        return "" if set(named) <= set(TARGETS) else f"no such target: {named}"
    if words[:2] == ["python", "-m"] and words[2].startswith("experiments."):
        return _refused_experiment(words[2], words[3:])
    if words[0] in ("python", "sh"):
        if not (ROOT / words[1]).exists():
            return f"no such file: {words[1]}"
        if words[1] == "launch/local.py":
            rest = words[words.index("-m") :]
            return _refused(shlex.join(["python", *rest]), remark)
        return ""
    return "" if (ROOT / words[0]).exists() else f"no such program: {words[0]}"


def _refused_experiment(name, arguments):
    module = importlib.import_module(name)
    groups = getattr(module, "GROUPS", flags.GROUPS)
    values = absl_flags.FlagValues()
    flags.define(groups, values)
    given = [a for a in arguments if a not in ("--help", "...")]
    try:
        command_line.parse([name, *given], groups, values)
        command_line.check_ranges(groups, values)
    except ValueError as error:
        return str(error)
    return ""


def runners(line):
    """What is run by a line that says nothing of hardware: keys that RUN should have."""
    command, _, remark = line.partition(" #")
    if "needs" in remark:
        return []
    found = []
    for part in re.split(r" (?:\||&&) ", command):
        words = [w for w in shlex.split(part) if not re.fullmatch(r"[A-Z_]+=.*", w)]
        if words[0] == "make":
            named = [f"make {word}" for word in words[1:]]
            found += [n for n in named if n[5:] not in (*IN_CI, *NOT_RUN)]
        elif words[0] in ("python", "sh"):
            script = [word for word in words[1:] if not word.startswith("-")][:1]
            modules = [after for word, after in itertools.pairwise(words) if word == "-m"]
            found += dict.fromkeys([*script, *modules])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_one_and_is_run_by_a_test_or_says_what_it_needs(page):
    found = [*fenced(page), *inline(page)]
    wrong = {line: reason for line in found if (reason := refused(line))}
    assert not wrong
    assert {line: run for line in found for run in runners(line) if run not in RUN} == {}


def test_the_experiments_docstrings_name_commands():
    lines = [
        re.split(r"  ", line.strip())[0]
        for path in sorted((ROOT / "experiments").glob("*.py"))
        for line in joined(ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
        if line.startswith("    python -m ")
    ]
    assert len(lines) > 20
    assert {line: reason for line in lines if (reason := refused(line))} == {}
    assert {line: run for line in lines for run in runners(line) if run not in RUN} == {}


@pytest.mark.parametrize("name", RUN)
def test_the_test_that_runs_it_is_there(name):
    file, _, function = RUN[name].partition("::")
    source = (ROOT / file).read_text()
    assert re.search(rf"^def {function}", source, re.M), RUN[name]
    if not name.startswith("make "):
        assert pathlib.PurePath(name.removeprefix("experiments.")).stem in file + source


@pytest.mark.parametrize("target", sorted({*TARGETS} - {"env"}))
def test_the_recipe_of_a_target_names_what_is_there(target):
    """Python files, folders and scripts, read from a dry run."""
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    named = re.findall(r"(?<![\w./-])((?:tests|launch|docs|experiments)/[\w./-]+)", done.stdout)
    assert [path for path in named if not (ROOT / path).exists()] == []
    for module in re.findall(r"-m (experiments\.\w+)", done.stdout):
        assert importlib.util.find_spec(module)


def test_the_check_can_refuse():
    for line in (
        "python -m experiments.gpt13b_sparse --densty=0.5",
        "python -m experiments.gpt13b_sparse --density=7",
        "make everything",
        "python launch/nowhere.py",
        "sh launch/nowhere.sh | cat",
        "docker build .",
    ):
        assert refused(line), line
    with pytest.raises(ModuleNotFoundError):
        refused("python -m experiments.nothing")
    assert sum(1 for page in PAGES for _ in fenced(page)) > 15
    assert runners("python mine.py --pattern=x") == ["mine.py"]
    assert runners("A=1 make bench && make test") == ["make bench"]
    assert runners("python launch/local.py --processes=2 -m experiments.x") == [
        "launch/local.py", "experiments.x"
    ]  # fmt: skip
    assert runners("python -m experiments.x   # needs a TPU") == []
    assert {*NOT_RUN} <= {*TARGETS} and IN_CI


def test_no_fence_escapes_the_checks():
    for page in PAGES:
        opened = re.findall(r"^ *```(\w*)$", page.read_text(encoding="utf-8"), re.M)
        assert set(opened[::2]) <= {"", "python"} and set(opened[1::2]) <= {""}, page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_python_in_the_pages_compiles():
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.M | re.S)
    ]
    assert blocks
    for block in blocks:
        compile(re.sub(r"^  ", "", block, flags=re.M), "page", "exec")


def test_the_reference_is_made_from_docstrings(tmp_path, monkeypatch):
    pytest.importorskip("pdoc")
    script = str(ROOT / "docs" / "api.py")
    names = ["sparse_dataflow", "sparse_dataflow.sparsity.patterns"]
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path), *names])
    runpy.run_path(script, run_name="__main__")
    page = (tmp_path / "sparse_dataflow.html").read_text(encoding="utf-8")
    import sparse_dataflow

    for name in sparse_dataflow.__all__:
        assert f'id="{name}"' in page, name
    assert "balanced layout of a named pattern" in page
    modules = runpy.run_path(script)["modules"]()
    assert "sparse_dataflow.kernels.gelu.api" in modules or len(modules) > 100
    assert (tmp_path / "sparse_dataflow" / "sparsity" / "patterns.html").exists()


def test_the_reference_replaces_no_page_of_others(tmp_path, monkeypatch):
    pytest.importorskip("pdoc")
    (tmp_path / "index.html").write_text("mine")
    script = str(ROOT / "docs" / "api.py")
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path), "sparse_dataflow.sparsity.patterns"])
    with pytest.raises(SystemExit, match=r"may not replace \(index\.html\)"):
        runpy.run_path(script, run_name="__main__")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_citation_and_licence_are_there():
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["title"] and citation["authors"]
    metadata = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert f"version = {citation['version']}\n" in metadata
    assert citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
