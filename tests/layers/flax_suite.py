"""Runs flax's own tests of nnx with `nnx.Linear`, and with a block-sparse linear in its place.

    python tests/layers/flax_suite.py [FOLDER]

The tests are those of the installed version of flax: pip fetches its source, which has them.  A
folder with flax's source can stand in for it.  A test that passes with `nnx.Linear` alone is
counted by its reason, which docs/evidence/compatibility.md has, and by its error.
"""

import collections
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import flax

LEAST = 0.89
"""Share of the tests that pass with `nnx.Linear` which must pass with a block-sparse linear."""


REASONS = {
    "expect that a state has only `kernel` and `bias`": (
        r"layout_\w{16}|num_leaves|different numbers of pytree children|has length of 3"
        r"|^AssertionError: \d+ != \d+|^(AssertionError: )?assert \d+ == \d+"
    ),
    "read or write `kernel` in a state, a gradient or the parameters of linen": (
        r"KeyError: .*kernel|'kernel' (not found )?in |No attribute 'kernel'|FlatState"
    ),
    "use `layer.kernel` as a variable: assign it, compare identities, read its metadata": (
        r"DenseKernel|kernel' of 'Linear' object has no setter|The kernel has shape|out_sharding"
        r"|__jax_array__|not subscriptable|unhashable|object has no attribute 'shape'"
    ),
    "expect the arrays, sizes or rows of a kernel and a bias, in specs, shards and summaries": (
        r"Tuples differ|Indivisible|inconsistent sizes|not found in '│"
        r"|^(AssertionError: |assert )\[?Array"
    ),
}
"""What a test does that a block-sparse linear does not allow -> what its error says; the first
that fits counts."""


def fetch(folder: str) -> str:
    """Fetches the source of the installed flax into a folder, and returns where it is."""
    release = f"flax=={flax.__version__}"
    options = ["--quiet", "--no-deps", "--no-binary=flax", f"--dest={folder}", release]
    subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True)
    [archive] = Path(folder).glob("flax-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return str(archive).removesuffix(".tar.gz")


def copy_tests(source: str, folder: str) -> None:
    """Copies the tests of nnx and pytest's settings, without the package that lies beside them."""
    shutil.copytree(f"{source}/tests/nnx", f"{folder}/tests/nnx")
    shutil.copy(f"{source}/pyproject.toml", folder)


def errors(folder: str, *options: str) -> tuple[int, dict[str, str]]:
    """Returns how many tests pass, and the errors of the others by name."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    result = subprocess.run(
        [*command, "--continue-on-collection-errors", *options, "tests/nnx"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "300"},
        capture_output=True,
        text=True,
    )
    passed = re.search(r"(\d+) passed", result.stdout)
    if passed is None:
        raise SystemExit(result.stdout[-2000:] + result.stderr[-2000:])
    lines = re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", result.stdout, re.MULTILINE)
    return int(passed[1]), dict(lines)


def reason(error: str) -> str:
    """Returns the reason of `REASONS` that an error has."""
    fitting = (name for name, words in REASONS.items() if re.search(words, error))
    return next(fitting, "other")


def main(source: str = "") -> None:
    """Prints both counts and what differs; `source` has flax's source already."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = f"{temporary}/tests"
        copy_tests(source or fetch(temporary), folder)
        dense, dense_errors = errors(folder)
        sparse, sparse_errors = errors(folder, "-p", "flax_linear")
    differ = {name: text for name, text in sparse_errors.items() if name not in dense_errors}
    for text, count in collections.Counter(differ.values()).most_common():
        print(f"{count:4} {text}")
    print()
    for text, count in collections.Counter(map(reason, differ.values())).most_common():
        print(f"| {text} | {count} |")
    print(f"flax {flax.__version__}: {dense} tests pass with nnx.Linear, {sparse} with ours.")
    if sparse < LEAST * dense:
        raise SystemExit(f"Legal: {LEAST:.0%} or more.")


if __name__ == "__main__":
    main(*sys.argv[1:])
