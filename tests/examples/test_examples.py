"""Every file in examples/ runs, in small, and does what its first line says."""

import ast
import importlib.util
import pathlib

import numpy as np
import pytest
from places import ROOT, TESTS

import sparse_dataflow as sd

FOLDER = ROOT / "examples"
FRAMEWORKS = TESTS / "layers" / "test_frameworks.py"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test():
    tests = [*pathlib.Path(__file__).parent.glob("test_*.py"), FRAMEWORKS]
    source = "".join(path.read_text(encoding="utf-8") for path in tests)
    for path in FOLDER.glob("*.py"):
        names = f'load("{path.stem}")', f'"{path.name}"', f'"{path.stem}": ('
        assert any(name in source for name in names)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_uses_public_names_alone(path):
    """It imports the package as a whole, and reads no attribute of it but the public names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name: alias.asname for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}": alias.asname for alias in node.names}
    own = ("sparse_dataflow", "experiments", "tests", "launch")
    used = {name: alias for name, alias in imported.items() if name.split(".")[0] in own}
    assert used == {"sparse_dataflow": "sd"}
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "sd"
    }
    assert names and names <= set(sd.__all__)


@pytest.mark.slow
def test_the_mlp_is_trained_dense_and_sparse():
    losses = load("sparsify_mlp").main(steps=5, width=64, block=8, evolve_every=2)
    assert set(losses) == {"dense", "sparse"} and np.isfinite(list(losses.values())).all()


def test_the_loop_of_ones_own_learns_and_saves_in_sixty_lines(tmp_path):
    module = load("own_training_loop")
    losses = module.main(steps=12, texts=3, folder=tmp_path / "model")
    assert losses[-1] < losses[0] and sd.load(tmp_path / "model").context == 64
    source = pathlib.Path(module.__file__).read_text(encoding="utf-8").split('"""', 2)[2]
    assert len([line for line in source.splitlines() if line.strip()]) <= 60
