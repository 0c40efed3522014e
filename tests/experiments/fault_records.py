"""What the fault tests measured, as the table in docs/surviving.md.

    python tests/experiments/fault_records.py

puts what faults.json holds into docs/surviving.md; `make faults` measures it anew before.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import textwrap
from pathlib import Path

from sparse_dataflow.files.errors import UserError

WIDTH = 100
FILE = Path(__file__).with_name("faults.json")
PAGE = Path(__file__).parents[2] / "docs" / "surviving.md"
RANDOM_KILLS = {1: "random kills in a row", 2: "random kills in a row, of one of two processes"}
MIRRORED = "the disk lost in the middle of a save, with a mirror"
FAULTS = (
    "kill -9 of a worker",
    "kill -9 of the coordinator",
    "kill -9 during a save",
    "kill -9 during a restore",
    "kill -9 during a layout's evolution",
    "kill -9 of two processes, then of the one that goes on",
    *RANDOM_KILLS.values(),
    MIRRORED,
    "SIGSTOP for longer than the heartbeat",
    "SIGSTOP for ten times the heartbeat",
    "disk full",
    "disk full on a worker alone",
    "storage that answers EIO or ESTALE a few times",
    "a truncated checkpoint",
    "a bit-flipped checkpoint",
    "a corrupt record in the data",
    "a clock that jumps back three years",
    "a clock that jumps ahead three years",
)
"""All that a test makes happen, in the order of the table."""
HEAD = (
    "| fault | status and message of all processes | seconds to their end | steps repeated | "
    "seconds to the first new step | same bits |\n|---|---|---|---|---|---|\n"
)
_PLACE = re.compile(r"Two processes of the scale `pico`(?s:.*?)\n\n(\|.*\n)+")


class Record:
    """The row of one fault; what was measured of it before is gone once its test begins.

    Kept where FAULTS names the file for it, else nowhere.
    """

    def __init__(self, fault: str):
        assert fault in FAULTS, fault
        self._fault, self._path = fault, os.environ.get("FAULTS")
        self._put(None)

    def note(self, ending, ended, repeated, back, same):
        """Keeps what was measured.

        Args:
          ending: in words.
          ended: seconds until the last process had ended; None where none did.
          repeated: steps that were made twice; None where they were not counted.
          back: seconds from the next start to the first step that was not made before; None
            without.
          same: whether the run ended at the bits of an undisturbed one; or in words, at what.
        """
        seconds = [None if value is None else round(value, 1) for value in (ended, back)]
        self._put([ending, seconds[0], repeated, seconds[1], same, _here()])

    def _put(self, row):
        if not self._path:
            return
        path = Path(self._path)
        rows = json.loads(path.read_text()) if path.exists() else {}
        rows.pop(self._fault, None)
        if row is not None:
            rows[self._fault] = row
        rows = {fault: rows[fault] for fault in FAULTS if fault in rows}
        path.write_text(json.dumps(rows, indent=1) + "\n")


STORM = FILE.with_name("storm.json")
KINDS = ("command lines", "corpora", "damaged run folders", "environments", "connections")
STORM_HEAD = (
    "| input | drawn | used | refused in words | traceback or hang |\n|---|---|---|---|---|\n"
)
_STORM_PLACE = re.compile(re.escape(STORM_HEAD) + r"(\|.*\n)*")


class Storm:
    """Counts the inputs of a kind, where FAULTS names a file; fails at the first that is wrong."""

    def __init__(self, kind: str, number: int):
        assert kind in KINDS
        self._kind, self._number, self._used, self._refused = kind, number, 0, 0

    @staticmethod
    def counted() -> bool:
        """Whether the inputs are counted for the page."""
        return "FAULTS" in os.environ

    def __iter__(self):
        yield from range(self._number)
        if self.counted():
            path = Path(os.environ["FAULTS"]).with_name(STORM.name)
            rows = json.loads(path.read_text()) if path.exists() else {}
            rows[self._kind] = [self._number, self._used, self._refused]
            rows = {kind: rows[kind] for kind in KINDS if kind in rows}
            path.write_text(json.dumps(rows, indent=1) + "\n")

    @contextlib.contextmanager
    def one(self, what):
        """The use of one input; a UserError in it counts as refused, any other error fails."""
        try:
            yield
            self._used += 1
        except UserError as error:
            assert 0 < len(str(error)) < 3000 and "Traceback" not in str(error), str(error)
            self._refused += 1
        except BaseException as error:
            error.add_note(f"the input: {what!r}"[:2000])
            raise


def storm_text(rows):
    """The counts as a table, in Markdown."""
    lines = []
    for kind in KINDS:
        drawn, used, refused = rows.get(kind, ["-"] * 3)
        lines.append(f"| {kind} | {drawn} | {used} | {refused} | {0 if kind in rows else '-'} |\n")
    return STORM_HEAD + "".join(lines)


def _here():
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    jax = importlib.metadata.version("jax")
    return f"{date}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax}"


def text(rows):
    """Where it was measured, and all FAULTS as a table, in Markdown."""
    where = "; ".join(sorted({row[-1] for row in rows.values()})) or "nowhere yet"
    lines = []
    for fault in FAULTS:
        row = rows.get(fault, ["not measured yet", *[None] * 5])
        ending, ended, repeated, back, same, _ = row
        cells = [fault, ending, ended, repeated, back, {True: "yes", False: "NO"}.get(same, same)]
        lines.append("| " + " | ".join("-" if c is None else str(c) for c in cells) + " |\n")
    intro = (
        "Two processes of the scale `pico`, checkpoints every 4 steps. The last three columns are "
        f"of the next start. Measured on {where}."
    )
    return f"{textwrap.fill(intro, WIDTH)}\n\n{HEAD}{''.join(lines)}"


def replaced(page, rows, storm):
    """The text of docs/surviving.md with the tables of these rows."""
    page, count = _STORM_PLACE.subn(lambda found: storm_text(storm), page)
    assert count == 1, "docs/surviving.md has no place for the counts"
    changed, count = _PLACE.subn(lambda found: text(rows), page)
    assert count == 1, "docs/surviving.md has no place for the table"
    return changed


if __name__ == "__main__":
    measured = json.loads(FILE.read_text())
    page = replaced(PAGE.read_text(encoding="utf-8"), measured, json.loads(STORM.read_text()))
    PAGE.write_text(page, encoding="utf-8")
    missing = [fault for fault in FAULTS if fault not in measured]
    print(f"{PAGE.name}: {len(measured)} of {len(FAULTS)} faults measured", *missing, sep="\n  ")
