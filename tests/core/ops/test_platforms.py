"""Code asks `platforms` for what is special on a platform, and compares no names of platforms."""

import ast
from pathlib import Path

import pytest

import sparse_dataflow
from sparse_dataflow.core.ops import dispatch, platforms

ROOT = Path(sparse_dataflow.__file__).parents[1]
NAMES = {platforms.CPU, platforms.GPU, platforms.TPU}
TRAITS = [value for value in vars(platforms).values() if isinstance(value, tuple)]


def comparisons(source: str) -> list[int]:
    """Lines that compare the target platform, or an argument `platform`, with names."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            named = {c.value for s in sides for c in ast.walk(s) if isinstance(c, ast.Constant)}
            words = {ast.unparse(side).rpartition(".")[2] for side in sides}
            target = words & {"platform()"} or any(ast.unparse(s) == "platform" for s in sides)
            if target and named & NAMES:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("package", ["sparse_dataflow", "experiments"])
def test_no_code_compares_the_target_platform_with_a_name(package):
    files = (ROOT / package).rglob("*.py")
    lines = {str(path): comparisons(path.read_text(encoding="utf-8")) for path in files}
    assert {path: found for path, found in lines.items() if found} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('dispatch.platform() == "cpu"', 1),
        ('platform() in ("cpu", "gpu")', 1),
        ('platform != "tpu"', 1),
        ('device.platform == "cpu"', 0),
        ("row.platform == platform()", 0),
        ("dispatch.on(platforms.FEW_ROWS)", 0),
    ],
)
def test_comparisons_are_found(source, count):
    assert len(comparisons(source)) == count


def test_every_trait_is_of_some_platforms_and_not_of_all():
    assert TRAITS and all(set(trait) < NAMES and trait for trait in TRAITS)
    assert set(platforms.ATTENTION) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_trait_is_asked_of_the_platform_that_is_traced_for(name):
    with dispatch.tracing_for(name):
        assert [dispatch.on(trait) for trait in TRAITS] == [name in trait for trait in TRAITS]
