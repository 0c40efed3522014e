"""Imports point one way: a room imports itself and the rooms below it."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "sparse_dataflow"

ROOMS = [
    "files", "hardware", "config", "distributed", "data", "sparsity", "kernels", "weights",
    "models", "layers", "optim", "planning", "checkpoint", "parallel", "training", "aot",
    "evaluation", "interchange", "reporting", "runs", "__main__", "experiments",
]  # fmt: skip
"""Lowest first.  A room that does not exist yet has its place already."""


def modules() -> dict[str, pathlib.Path]:
    """Name of each module, without the package's -> its file; the package itself left out."""
    found = {}
    for path in sorted([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__").removeprefix(f"{PACKAGE}.")
        if name != PACKAGE:
            found[name] = path
    return found


def imported(source: str, known: dict[str, pathlib.Path]) -> Iterator[str]:
    """Modules of the package that `source` imports, wherever in it, as `modules` names them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            base = f"{node.module}"
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if short(name) in known else base for name in names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] in (PACKAGE, "experiments"):
                yield short(name)


def short(name: str) -> str:
    """A module's name without the package's."""
    return name.removeprefix(f"{PACKAGE}.")


def room(module: str) -> str:
    """The room of a module."""
    return module.partition(".")[0]


@pytest.fixture(scope="module")
def upward() -> set[tuple[str, str]]:
    """(importer, imported) of all imports that point upward."""
    known = modules()
    return {
        (name, other)
        for name, path in known.items()
        for other in imported(path.read_text(encoding="utf-8"), known)
        if other == PACKAGE or ROOMS.index(room(name)) < ROOMS.index(room(other))
        if room(name) != "experiments"
    }


def test_every_room_has_a_place():
    assert {room(name) for name in modules()} <= set(ROOMS)


def test_what_is_imported_exists():
    known = modules()
    for name, path in known.items():
        for other in imported(path.read_text(encoding="utf-8"), known):
            assert other in known or other == PACKAGE, f"{name} imports {other}"


def test_no_import_points_upward(upward):
    assert not upward, "\n".join(f"{name} imports {other}" for name, other in sorted(upward))


def test_imports_are_found_wherever_they_are():
    source = """
from typing import TYPE_CHECKING
import sparse_dataflow.core.training.cost as prices
if TYPE_CHECKING:
    from sparse_dataflow.data import (
        batches,
    )
def later():
    from sparse_dataflow.core.model.gpt import init
"""
    found = set(imported(source, modules()))
    assert found == {"planning.cost", "data.batches", "models.gpt"}
