"""What the fault tests measured, as the table in docs/evidence/surviving.md.

    python tests/experiments/fault_records.py

puts what faults.json holds into docs/evidence/surviving.md; `make faults` measures it anew before.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import drawn_inputs
from places import ROOT

WIDTH = 100
FILE = Path(__file__).with_name("faults.json")
PAGE = ROOT / "docs" / "evidence" / "surviving.md"
RANDOM_KILLS = {1: "random kills in a row", 2: "random kills in a row, of one of two processes"}
MIRRORED = "the disk lost in the middle of a save, with a mirror"
MIRROR_KILLS = "random kills while a mirror is written and read"
THREE = "kill -9 of one of three processes in an evolution, then in the restore"
TOOL_KILLS = {name: f"random kills of {name}" for name in ("export", "evaluate", "generate")}
POWER_CUT = "a power cut: what was not flushed to the disk is lost"
EXHAUSTED = "no more memory or threads, at a save or in a step"
FAULTS = (
    "kill -9 of a worker",
    "kill -9 of the coordinator",
    "kill -9 during a save",
    "kill -9 during a restore",
    "kill -9 during a layout's evolution",
    "kill -9 of two processes, then of the one that goes on",
    THREE,
    *RANDOM_KILLS.values(),
    POWER_CUT,
    MIRROR_KILLS,
    MIRRORED,
    *TOOL_KILLS.values(),
    "SIGSTOP for longer than the heartbeat",
    "SIGSTOP for ten times the heartbeat",
    EXHAUSTED,
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
        "Two processes of the scale `pico`, checkpoints every 4 steps. The last three columns "
        f"describe the next start. Measured on {where}."
    )
    return f"{textwrap.fill(intro, WIDTH)}\n\n{HEAD}{''.join(lines)}"


def replaced(page, rows, drawn):
    """The text of docs/evidence/surviving.md with the tables of these rows."""
    page, count = drawn_inputs.PLACE.subn(lambda match: drawn_inputs.text(drawn), page)
    assert count == 1, "docs/evidence/surviving.md has no place for the counts"
    changed, count = _PLACE.subn(lambda match: text(rows), page)
    assert count == 1, "docs/evidence/surviving.md has no place for the table"
    return changed


if __name__ == "__main__":
    measured = json.loads(FILE.read_text())
    page = replaced(
        PAGE.read_text(encoding="utf-8"), measured, json.loads(drawn_inputs.FILE.read_text())
    )
    PAGE.write_text(page, encoding="utf-8")
    missing = [fault for fault in FAULTS if fault not in measured]
    print(f"{PAGE.name}: {len(measured)} of {len(FAULTS)} faults measured", *missing, sep="\n  ")
