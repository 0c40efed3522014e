"""Applies each fault of `faults.toml` to a copy of the package, and reports which test catches it.

    python tests/mutation/run.py --only=padding

The nearest test files of a fault run until the first failure.  At the end, the tests that failed
run on a copy without a fault: one that fails there too has caught nothing.
"""

# mutmut and cosmic-ray change every operator of whole modules; neither takes a list of texts.

import argparse
import concurrent.futures
import importlib.util
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import fault_list
import pytest

SELECTIONS = {
    "test": ["--hypothesis-profile=fewer-draws", "-m", "not slow and not nightly"],
    "test-all": ["-m", "not nightly"],
}
"""Target of the Makefile -> the options of pytest that select its tests."""

LEAST_CAUGHT = 0.95
PROGRAMS = Path(".pytest_cache") / "programs"
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)


class Outcome(NamedTuple):
    """What the tests of a fault said.

    Attributes:
      failed: ids of the tests that failed.
      words: why none did.
      seconds: wall-clock time.
    """

    failed: tuple[str, ...]
    words: str
    seconds: float


def copy_of_project(folder: Path) -> Path:
    """Returns a copy of the project in a folder, which shares the compiled programs of its tests.

    jax finds a program by its operations, so a fault finds no program without it.
    """
    copy = folder / "project"
    shutil.copytree(fault_list.ROOT, copy, ignore=NOT_COPIED)
    shared = fault_list.ROOT / PROGRAMS
    shared.mkdir(parents=True, exist_ok=True)
    (copy / PROGRAMS).parent.mkdir()
    (copy / PROGRAMS).symlink_to(shared)
    return copy


def write(path: Path, text: str) -> None:
    """Writes a module and removes its bytecode, which Python would take for that of the new text
    if size and second are the same."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(copy: Path, tests: list[str], selection: list[str], limit: float) -> Outcome:
    """Runs tests of a copy of the project in a process of their own.

    Args:
      tests: files, or ids of tests.
      selection: options of pytest.
      limit: most seconds.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-p", "mutation.first_failure"]
    path = os.pathsep.join([str(copy), str(copy / "tests")])
    started = time.monotonic()
    with subprocess.Popen(
        [*command, *selection, *tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # The tests may have started processes, which are in its group.
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            return Outcome((), f"no end in {limit:.0f} s", limit)
    seconds = time.monotonic() - started
    if process.returncode == pytest.ExitCode.OK:
        return Outcome((), "survived", seconds)
    if process.returncode != pytest.ExitCode.TESTS_FAILED:  # Such as a file that has no tests.
        last = output.strip().splitlines()[-1:] or ["no output"]
        return Outcome((), f"pytest ended with {process.returncode}: {last[0]}", seconds)
    return Outcome(tuple(FAILED.findall(output)), "", seconds)


def try_fault(fault: fault_list.Fault, copy: Path, selection: list[str], limit: float) -> Outcome:
    """Runs the nearest tests of a fault on a copy of the project, which is whole again after."""
    path = copy / fault.file
    before = path.read_text(encoding="utf-8")
    write(path, fault.source())
    try:
        return run_tests(copy, fault.tests, ["-x", *selection], limit)
    finally:
        write(path, before)


def report(fault: fault_list.Fault, outcome: Outcome) -> None:
    """Prints the row of a fault."""
    result = " ".join(outcome.failed) or outcome.words.upper()
    print(f"{fault.name:<34} {outcome.seconds:>6.1f} s  {result}", flush=True)


def main() -> int:
    """Runs the faults that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name or file matches")
    parser.add_argument("--selection", choices=SELECTIONS, default="test", help="tests that run")
    parser.add_argument("-m", dest="marks", help="marks of the tests, in place of --selection")
    parser.add_argument("--jobs", type=int, default=1, help="faults that run side by side")
    parser.add_argument("--limit", type=float, default=300, help="most seconds of a fault")
    options = parser.parse_args()
    selection = SELECTIONS[options.selection]
    if options.marks is not None:
        selection = ["-m", options.marks]
    chosen = re.compile(options.only)
    faults = [f for f in fault_list.read() if chosen.search(f"{f.name} {f.file}")]
    for fault in faults:
        fault.source()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(options.jobs):
            copies.put(copy_of_project(Path(folder) / str(job)))

        def attempt(fault):
            copy = copies.get()
            try:
                outcome = try_fault(fault, copy, selection, options.limit)
            finally:
                copies.put(copy)
            report(fault, outcome)
            return outcome

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(attempt, faults))
        catching = sorted({test for outcome in outcomes for test in outcome.failed})
        healthy = Outcome((), "survived", 0)
        if catching:
            healthy = run_tests(copies.get(), catching, selection, 3600)
    broken = set(healthy.failed)
    caught = [bool(set(outcome.failed) - broken) for outcome in outcomes]
    for test in sorted(broken):
        print(f"{test} fails without a fault too, and so has caught nothing")
    if healthy.words not in ("", "survived"):
        print(f"The tests without a fault: {healthy.words}")
        return 1
    print(f"{sum(caught)} of {len(faults)} faults are caught by: {shlex.join(selection)}")
    for fault, was_caught in zip(faults, caught, strict=True):
        if not was_caught:
            print(f"SURVIVED {fault.name} in {fault.file}: {fault.why}")
    return int(sum(caught) < LEAST_CAUGHT * len(faults))


if __name__ == "__main__":
    sys.exit(main())
