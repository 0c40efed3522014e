"""Runs flax's own tests of nnx with `nnx.Linear`, and with a block-sparse linear in its place.

    python tests/layers/flax_suite.py

The tests are those of the installed version of flax, from its public repository.  A test that
passes with `nnx.Linear` alone is listed with its error.
"""

import collections
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import flax

SOURCE = "https://github.com/google/flax"

LEAST = 0.89
"""Share of the tests that pass with `nnx.Linear` which must pass with a block-sparse linear."""


def fetch(folder: str) -> None:
    """Fetches the tests of nnx into a folder."""
    branch = f"v{flax.__version__}"
    options = ["--quiet", "--depth=1", "--filter=blob:none", "--sparse", f"--branch={branch}"]
    subprocess.run(["git", "clone", *options, SOURCE, folder], check=True)
    subprocess.run(["git", "-C", folder, "sparse-checkout", "set", "tests/nnx"], check=True)


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


def main(folder: str = "") -> None:
    """Prints both counts and what differs; `folder` has a copy of flax's repository already."""
    with tempfile.TemporaryDirectory() as temporary:
        if not folder:
            folder = f"{temporary}/flax"
            fetch(folder)
        dense, dense_errors = errors(folder)
        sparse, sparse_errors = errors(folder, "-p", "flax_linear")
    differ = {name: text for name, text in sparse_errors.items() if name not in dense_errors}
    for text, count in collections.Counter(differ.values()).most_common():
        print(f"{count:4} {text}")
    print(f"flax {flax.__version__}: {dense} tests pass with nnx.Linear, {sparse} with ours.")
    if sparse < LEAST * dense:
        raise SystemExit(f"Legal: {LEAST:.0%} or more.")


if __name__ == "__main__":
    main(*sys.argv[1:])
