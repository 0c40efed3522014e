"""Measures a chip within a time limit: a process for each row, one page at the end."""

import contextlib
import dataclasses
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparse_dataflow.commands.experiment_modules import command_of
from sparse_dataflow.files import folders, json_files, storage
from sparse_dataflow.files.errors import UserError, redact
from sparse_dataflow.hardware import detect

from .. import energy
from . import chip_data, chip_rows
from .chip_data import (
    DONE,
    FAILED,
    TIMED_OUT,
    ChipFacts,
    ChipReport,
    Measure,
    RowResult,
)
from .chip_rows import Row

OWNER = "chip_report"
SAVED, PAGE, OUTPUT = "report.json", "report.html", "output.txt"
SHORTEST = 5.0
"""Least seconds for which a row is started."""

SHARE = 0.4
"""Share of the remaining time that a row may take where its own limit is shorter, so that on a slow
machine the important rows end."""

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""

LAST_LINES = 15
"""Lines of output that a failed row shows."""

FIND_SECONDS = 120.0
_FIND_CHIP = f"from {__package__} import collect; collect.print_chip()"


def collect_report(options) -> int:
    """Measures, prints and writes; see `experiments.chip_report`.

    Returns:
      0 if the row that answers is done, else 1.

    Raises:
      UserError: there is no usable chip, or the folder is not this program's.
    """
    deadline = time.monotonic() + 60 * options.minutes
    if options.out:
        folders.refuse_foreign(Path(options.out), OWNER)
    chip, versions = find_chip(min(FIND_SECONDS, 60 * options.minutes))
    folder = Path(options.out or f"runs/{OWNER}-{detect.slug(chip.name)}")
    folders.claim(folder, OWNER)
    scale = chip_rows.target(chip, options.scale)
    print(f"{chip.name}: {options.minutes:g} minutes, scale {scale}", flush=True)
    if chip.platform == "cpu" and shutil.which("nvidia-smi"):
        print('An NVIDIA GPU is not used; to use it: pip install -e ".[cuda]"', flush=True)
    command = redact(f"{command_of(OWNER)} {shlex.join(sys.argv[1:])}".strip())
    empty = ChipReport(chip, scale, chip_rows.DENSITY, command, _now(), versions)
    report = collect(folder, empty, chip_rows.rows(chip, scale), deadline)
    print(f"\n{report.answer}\n{folder / PAGE}", flush=True)
    answer = report.row(chip_data.ANSWER)
    return 0 if answer and answer.status == DONE else 1


def print_chip() -> None:
    """Prints the chip of this process and its versions as one line of JSON."""
    import jax

    from sparse_dataflow.commands import measurement

    chip, device = detect.detect([]), jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    # An AMD GPU has a name there, such as gfx90a.
    capability = capability if capability.replace(".", "").isdigit() else ""
    facts = ChipFacts(
        chip.name, device.platform, chip.memory_bytes, capability, energy.source(device.platform)
    )
    versions = measurement.provenance("")["versions"]
    print(json.dumps({"chip": dataclasses.asdict(facts), "versions": versions}), flush=True)


def find_chip(seconds: float) -> tuple[ChipFacts, dict[str, str]]:
    """Returns (chip, versions), found by another process, so that this one leaves the chip free.

    Raises:
      UserError: jax does not start within `seconds`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FIND_CHIP],
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"jax found no chip within {seconds:.0f} s.") from None
    if done.returncode:
        raise UserError(f"jax does not start here: {_tail(done.stderr, 1)}")
    facts = json_files.parse(done.stdout.splitlines()[-1])
    return ChipFacts(**facts["chip"]), facts["versions"]


def collect(folder: Path, report: ChipReport, rows: Sequence[Row], deadline: float) -> ChipReport:
    """Runs the rows that are not done yet, until the deadline.

    The report is written before the first row and after each row, as JSON and as a page.

    Args:
      folder: output folder, which may hold an earlier report of the same chip.
      report: the report without rows.
      rows: rows in order of importance.
      deadline: on the clock of `time.monotonic`.

    Returns:
      The report of all rows.

    Raises:
      UserError: the folder holds the report of another chip, or cannot be written.
    """
    saved = _saved(folder, report)
    report = dataclasses.replace(report, rows=tuple(_outcome(row, saved) for row in rows))
    _write(folder, report)
    for row in rows:
        result = report.row(row.name)
        if result and result.status == DONE:
            print(f"{row.name}: done before", flush=True)
            continue
        left = deadline - time.monotonic() - GRACE
        seconds = min(left, max(row.seconds, SHARE * left))
        if seconds < SHORTEST:
            print(f"{row.name}: no time is left", flush=True)
            continue
        print(f"{row.name}: {row.title} (up to {seconds:.0f} s)", flush=True)
        result = measure(row, folder / "rows" / row.name, seconds, report.versions)
        report = dataclasses.replace(report.with_row(result), date=_now())
        _write(folder, report)
        print(_summary(result), flush=True)
    return report


def measure(row: Row, folder: Path, seconds: float, versions: dict[str, str]) -> RowResult:
    """Runs one row in a process of its own.

    Args:
      folder: folder of its output and result, which is made anew.
      seconds: time after which the process is stopped.
      versions: package -> version.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    status = _run([*row.command, f"--keep={folder}"], row.environment, folder / OUTPUT, seconds)
    measures, problem = _measures(row, folder)
    outcome = TIMED_OUT if status is None else DONE if status == 0 and measures else FAILED
    if outcome != DONE:
        measures = tuple(dataclasses.replace(m, label=f"{m.label} (incomplete)") for m in measures)
    lines = json_files.read_bytes(folder / OUTPUT).decode(errors="replace")
    if status == 0:
        lines += problem
    return dataclasses.replace(
        _outcome(row, {}),
        status=outcome,
        measures=measures,
        exit_status=status,
        seconds=time.monotonic() - start,
        output="" if outcome == DONE else redact(_tail(lines, LAST_LINES)),
        date=_now(),
        versions=versions,
    )


def _run(command, environment: Mapping[str, str], output: Path, seconds: float) -> int | None:
    """Runs a command; returns its exit status, None if it was stopped after `seconds`."""
    variables = {**environment, **os.environ, "PYTHONUNBUFFERED": "1"}
    with output.open("wb") as file:
        # Its own session, so that the processes that it starts are stopped with it.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        # After SIGTERM too, no process stays behind.
        previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _stop(process)
            signal.signal(signal.SIGTERM, previous)


def _stop(process: subprocess.Popen) -> None:
    """Ends a process and what it started: SIGTERM, then SIGKILL."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    # A process that waits for a driver may outlive its SIGKILL.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def _measures(row: Row, folder: Path) -> tuple[tuple[Measure, ...], str]:
    """Returns (figures of the row's result, why there are none)."""
    paths = list(folder.glob("*.json"))
    if not paths:
        return (), "It wrote no result."
    try:
        return tuple(row.measures(json_files.load(paths[0]))), ""
    except json_files.MALFORMED as error:
        return (), f"Its result cannot be read: {error!r}"


def _saved(folder: Path, report: ChipReport) -> dict[str, RowResult]:
    """Returns name -> outcome of the report in the folder, of the versions that run now.

    Raises:
      UserError: it is the report of another chip.
    """
    if not (folder / SAVED).exists():
        return {}
    saved = chip_data.read(folder / SAVED)
    if saved.chip.name != report.chip.name:
        raise UserError(
            f"{folder} has the report of {saved.chip.name}, and this is {report.chip.name}; "
            "give another --out."
        )
    return {row.name: row for row in saved.rows if row.versions == report.versions}


def _outcome(row: Row, saved: Mapping[str, RowResult]) -> RowResult:
    """Returns the saved outcome of a row, if it is of the same command; else one not yet run."""
    variables = [f"{name}={value}" for name, value in row.environment.items()]
    words = ["python", *row.command[1:]] if row.command[0] == sys.executable else row.command
    command = " ".join([*variables, shlex.join(words)])
    result = saved.get(row.name)
    if result and result.command == command:
        return result
    return RowResult(row.name, row.title, command)


def _write(folder: Path, report: ChipReport) -> None:
    # Imports matplotlib, which is slow.
    from . import chip_page

    content = json.dumps(chip_data.to_json(report), indent=1) + "\n"
    try:
        storage.replace(folder / SAVED, content.encode())
        storage.replace(folder / PAGE, chip_page.render(report).encode())
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}.") from error


def _summary(result: RowResult) -> str:
    figures = [f"{m.label} {m.ratio:.2f}x" if m.ratio else m.label for m in result.measures]
    if result.status == DONE:
        return f"  {'; '.join(figures)} ({result.seconds:.0f} s)"
    return f"  not measured: {result.reason}\n    {_tail(result.output, 1)}"


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
