"""Runs the rows of a study until a deadline, and keeps each result at once."""

import gc
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparse_dataflow.commands import measurement
from sparse_dataflow.files import folders, json_files, storage
from sparse_dataflow.files.errors import UserError, redact
from sparse_dataflow.hardware import detect

OWNER = "chip_study"
SAVED = "study.json"
DONE, FAILED, SKIPPED, STARTED = "done", "failed", "skipped", "started"

COMPILE_SHARE = 0.4
"""Share of the time after which no compilation begins ahead of the measurements."""

MEMORY_SHARE = "0.95"
"""Share of a GPU's memory that jax reserves, unless the user says otherwise."""


def study_chip(options) -> int:
    """Measures, prints and writes; see `experiments.chip_report`.

    Returns:
      0 if every row is done or has nothing to measure here, else 1.

    Raises:
      UserError: the folder is not this program's, or holds a file that is no study.
    """
    start = time.monotonic()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)
    # jax reads the share when it starts.
    from .models import REHEARSAL, Sizes
    from .program_pool import ProgramPool
    from .rows import ROWS, Study

    chip = detect.detect([])
    folder = Path(options.out or f"runs/{OWNER}-{detect.slug(chip.name)}")
    folders.refuse_foreign(folder, OWNER)
    folders.claim(folder, OWNER)
    deadline = start + 60 * options.minutes
    sizes = REHEARSAL if options.rehearse else Sizes()
    pool = ProgramPool(max(2, (os.cpu_count() or 2) // 2))
    study = Study(chip, sizes, pool, deadline, options.text)
    records = Records(folder / SAVED, chip.name + (" (rehearsal)" if options.rehearse else ""))
    print(f"{chip.name}: {options.minutes:g} minutes, results in {records.path}", flush=True)
    collect(study, ROWS, records, rehearse=options.rehearse)
    statuses = [records.status(row.name) for row in ROWS]
    return 0 if all(status in (DONE, SKIPPED) for status in statuses) else 1


class Records:
    """Results by row, in a file that is replaced after each change; rows of other chips stay."""

    def __init__(self, path: Path, chip: str):
        self.path, self._chip = path, chip
        self._all: dict[str, dict[str, dict]] = {}
        if path.exists():
            try:
                self._all = dict(json_files.load(path)["chips"])
            except (*json_files.MALFORMED, KeyError, TypeError):
                raise UserError(f"{path} is no study; give another --out.") from None
        self._rows = self._all.setdefault(chip, {})

    def status(self, name: str) -> str:
        """Returns the status of a row; "" if it was never started."""
        return self._rows.get(name, {}).get("status", "")

    def tries(self, name: str) -> int:
        """Returns how often a row was started."""
        return self._rows.get(name, {}).get("tries", 0)

    def write(self, name: str, record: Mapping) -> None:
        """Replaces the record of a row.

        Raises:
          UserError: the file cannot be written.
        """
        self._rows[name] = dict(record)
        content = json.dumps({"chips": self._all}, indent=1) + "\n"
        try:
            storage.replace(self.path, content.encode())
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}.") from error


def waiting(rows: Sequence, records: Records) -> list:
    """Returns the rows without a result: those that were tried less often first, else in order."""
    left = [row for row in rows if records.status(row.name) not in (DONE, SKIPPED)]
    return sorted(left, key=lambda row: records.tries(row.name))


def collect(study, rows: Sequence, records: Records, rehearse: bool = False) -> None:
    """Compiles what the rows without a result need, then runs them until the deadline.

    A row that fails is written with its error, and the next is run. A row that was started and has
    no result, as after a kill, is tried again after those that were not.

    Args:
      rehearse: whether rows start however little time is left.
    """
    from .rows import Skipped, sentence

    left, failed = waiting(rows, records), {}
    for row in left:
        try:
            study.pool.add(row.programs(study.sizes, study.chip))
        except Exception as error:
            failed[row.name] = error
    skipped = study.pool.settle(time.monotonic() + COMPILE_SHARE * study.left())
    count = len(study.pool.seconds)
    print(f"{count} programs compiled, {len(skipped)} not yet", flush=True)
    for row in left:
        least = 0 if rehearse else row.least
        if study.left() < max(least, 0.0):
            print(
                f"{row.name}: waits for the next call, {row.least:.0f} s are not left", flush=True
            )
            continue
        record = {"title": row.title, "tries": records.tries(row.name) + 1, "status": STARTED}
        records.write(row.name, record)
        print(f"{row.name}: {row.title}", flush=True)
        start = time.monotonic()
        try:
            if row.name in failed:
                raise failed[row.name]
            record |= {"status": DONE, "result": row.measure(study)}
        except Skipped as error:
            record |= {"status": SKIPPED, "problem": redact(str(error))}
        except Exception as error:
            record |= {"status": FAILED, "problem": redact(sentence(error))}
        record |= {"seconds": time.monotonic() - start, **measurement.provenance(study.chip.name)}
        records.write(row.name, record)
        lines = [record["status"], record.get("problem", ""), *figures(record.get("result", {}))]
        print("\n".join(f"  {line}" for line in lines if line), flush=True)
        gc.collect()  # States of this row, before those of the next are drawn.


def figures(result: Mapping, path: str = "") -> list[str]:
    """Returns "path: value" for every number and text of a nested result; lists are left out."""
    lines = []
    for name, value in result.items():
        where = f"{path}{name}"
        if isinstance(value, Mapping):
            lines += figures(value, f"{where}.")
        elif isinstance(value, float):
            lines.append(f"{where}: {value:.4g}")
        elif isinstance(value, int | str):
            lines.append(f"{where}: {value}")
    return lines
