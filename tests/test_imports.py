"""Imports point one way: a room imports itself and the rooms below it."""

import ast
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from places import ROOT

PACKAGE = "sparse_dataflow"

ROOMS = [
    "files", "hardware",
    "core.batch", "core.collectives", "core.messages", "core.step_metrics", "core.sums",
    "core.config", "core.layouts", "core.ops", "core.weights", "core.model", "core.optim",
    "core.checkpoint", "core.executors", "core.training", "pruning",
    "pipeline", "relay", "layers", "cluster", "monitoring", "runs", "chips", "data", "planner",
    "compile", "evaluation", "interchange", "reporting", "commands", "__main__", "experiments",
]  # fmt: skip
"""Lowest first.  Below the core are two rooms; what is above it the core never imports."""

MOST_OF_A_STEP = 56
"""Files that `core.training.step` loads.  What one setting alone needs, such as experts, Muon or a
mesh, is loaded by the function that reads the setting."""

MOST_FILES_THAT_TRAIN, MOST_LINES_THAT_TRAIN = 110, 25_000
"""Files, and their lines, that `commands.job.train_models` loads: what is between a resolved run
and its last step.  Plans, interchange and reports are read before and after it."""

MOST_WITH_TABLES = 5
"""Functions that name the index tables of a layout, outside of the rooms that compute with them.
Elsewhere a layout is one leaf of its weight; see `model.stacks.layouts_by_place`."""


def modules() -> dict[str, pathlib.Path]:
    """Name of each module, without the package's -> its file; the package itself left out."""
    found = {}
    for path in sorted([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__").removeprefix(f"{PACKAGE}.")
        if name not in (PACKAGE, "core"):
            found[name] = path
    return found


def imported(
    source: str, known: dict[str, pathlib.Path], importer: str = "experiments.any"
) -> Iterator[str]:
    """Modules of the package that `source` imports, wherever in it, by name too, as `modules` names
    them.  Kernels, which ops load by name where they run, do not count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                # A wheel has the experiments inside the package, under another name.
                assert room(importer) == "experiments", "imports are absolute"
                above = importer.split(".")[: -node.level]
                base = ".".join([*above, base] if base else above)
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if short(name) in known else base for name in names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
        else:
            continue
        for name in names:
            is_kernel = importer.startswith("core.") and short(name).startswith("chips.")
            if name.partition(".")[0] in (PACKAGE, "experiments") and not is_kernel:
                yield short(name)


def short(name: str) -> str:
    """A module's name without the package's."""
    return name.removeprefix(f"{PACKAGE}.")


def room(module: str) -> str:
    """The room of a module: the longest of ROOMS that its name begins with."""
    parts = module.split(".")
    return next((r for n in (2, 1) if (r := ".".join(parts[:n])) in ROOMS), parts[0])


@pytest.fixture(scope="module")
def upward() -> set[tuple[str, str]]:
    """(importer, imported) of all imports that point upward."""
    known = modules()
    return {
        (name, other)
        for name, path in known.items()
        for other in imported(path.read_text(encoding="utf-8"), known, name)
        if other == PACKAGE or ROOMS.index(room(name)) < ROOMS.index(room(other))
        if room(name) != "experiments"
    }


def test_every_room_has_a_place():
    assert {room(name) for name in modules()} <= set(ROOMS)


def test_what_is_imported_exists():
    known = modules()
    for name, path in known.items():
        for other in imported(path.read_text(encoding="utf-8"), known, name):
            assert other in known or other == PACKAGE, f"{name} imports {other}"


def test_no_import_points_upward(upward):
    assert not upward, "\n".join(f"{name} imports {other}" for name, other in sorted(upward))


def test_the_core_imports_no_room_but_files_and_hardware():
    known = modules()
    rooms = {
        room(other).partition(".")[0]
        for name, path in known.items()
        if name.startswith("core.")
        for other in imported(path.read_text(encoding="utf-8"), known, name)
    }
    assert rooms == {"core", "files", "hardware"}


def loaded(statement: str) -> set[str]:
    """Modules of the package that a new process has after a statement."""
    code = f"{statement}; import json, sys; print(json.dumps([*sys.modules]))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    return {name for name in json.loads(output) if name.partition(".")[0] == PACKAGE}


def test_a_step_loads_what_it_needs():
    step = loaded(f"import {PACKAGE}.core.training.step")
    assert len(step) <= MOST_OF_A_STEP, "\n".join(sorted(step))
    names = {name.rpartition(".")[2] for name in step}
    assert not names & {"experts", "rotary", "muon", "factories", "mesh", "sharding", "chips"}


def test_what_trains_a_run_loads_neither_plans_nor_reports():
    modules = loaded(f"import {PACKAGE}.commands.job.train_models")
    files = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in modules]
    files = [path for path in files if path.is_file()]  # Packages have no code of their own.
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert len(files) <= MOST_FILES_THAT_TRAIN, "\n".join(map(str, sorted(files)))
    assert lines <= MOST_LINES_THAT_TRAIN
    rooms = {room(short(name)) for name in modules}
    assert not rooms & {"planner", "interchange", "evaluation", "reporting", "compile", "data"}


def functions_with(name: str, source: str) -> set[str]:
    """Functions that have a name, an argument or an attribute of this name in them."""
    kinds = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr"}
    return {
        function.name
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if type(node) in kinds and getattr(node, kinds[type(node)]) == name
    }


def test_a_layout_is_a_leaf_and_few_know_its_tables():
    owners = ("core.ops.", "core.layouts.", "chips.", "experiments.")
    named = {
        (module, function)
        for module, path in modules().items()
        if not module.startswith(owners)
        for function in functions_with("tables", path.read_text(encoding="utf-8"))
    }
    assert len(named) <= MOST_WITH_TABLES, named


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(tables): pass", {"f"}),
        ("def f(x): return x.tables()", {"f"}),
        ("def f():\n    def g(): return tables\n    return g", {"f", "g"}),
        ("tables = 1\ndef tables_of(x): return {'tables': x}", set()),
    ],
)
def test_functions_with_a_name_are_found(source, found):
    assert functions_with("tables", source) == found


def test_no_module_of_the_core_opens_a_socket():
    opens = re.compile(r"^\s*(import|from) (socket|http|urllib|ssl|asyncio)\b", re.MULTILINE)
    files = (ROOT / PACKAGE / "core").rglob("*.py")
    assert [str(path) for path in files if opens.search(path.read_text(encoding="utf-8"))] == []


def test_imports_are_found_wherever_they_are():
    source = """
from typing import TYPE_CHECKING
import sparse_dataflow.core.training.cost as prices
if TYPE_CHECKING:
    from sparse_dataflow.data import (
        shards,
    )
def later():
    from sparse_dataflow.core.model.gpt import init
    importlib.import_module("sparse_dataflow.core.weights.kinds")
"""
    found = set(imported(source, modules()))
    assert found == {"core.training.cost", "data.shards", "core.model.gpt", "core.weights.kinds"}


def test_no_file_of_the_core_has_the_name_of_another():
    names = [path.name for path in (ROOT / PACKAGE / "core").rglob("*.py")]
    names = [name for name in names if name != "__init__.py"]
    assert len(names) == len(set(names)), sorted(n for n in set(names) if names.count(n) > 1)


def test_no_modules_import_each_other_in_a_circle():
    known = modules()
    graph = {n: set(imported(p.read_text(encoding="utf-8"), known, n)) for n, p in known.items()}
    while leaves := {n for n, others in graph.items() if not others & graph.keys() - {n}}:
        graph = {n: others for n, others in graph.items() if n not in leaves}
    assert not graph, f"in a circle, or above one: {sorted(graph)}"
