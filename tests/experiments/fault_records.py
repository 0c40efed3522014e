"""What the fault tests measured, as the table in BUILD.md.

    python tests/experiments/fault_records.py tests/experiments/faults.json

prints the rows; `make faults` makes the file anew.
"""

import json
import os
import sys
from pathlib import Path

FILE = Path(__file__).with_name("faults.json")
FAULTS = (
    "kill -9 of a worker",
    "kill -9 of the coordinator",
    "kill -9 during a save",
    "kill -9 during a restore",
    "kill -9 during a layout's evolution",
    "50 kills in a row at random moments of one training",
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
    "| fault | what all processes end with | seconds until all have ended | steps made again | "
    "seconds from the next start to the first new step | ends at the bits of an undisturbed run |\n"
    "|---|---|---|---|---|---|\n"
)


def note(fault, ending, ended, repeated, back, same):
    """Keeps a row where FAULTS names a file to keep it in.

    Args:
      fault: in words.
      ending: in words.
      ended: seconds until the last process had ended; None where none did.
      repeated: steps that were made twice.
      back: seconds from the next start to the first step that was not made before; None without.
      same: whether the run ended at the bits of an undisturbed one.
    """
    assert fault in FAULTS
    if not (path := os.environ.get("FAULTS")):
        return
    path = Path(path)
    rows = json.loads(path.read_text()) if path.exists() else {}
    seconds = [None if value is None else round(value, 1) for value in (ended, back)]
    rows[fault] = [ending, seconds[0], repeated, seconds[1], same]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows):
    """All FAULTS as Markdown, with what was measured of them."""
    lines = []
    for fault in FAULTS:
        ending, ended, repeated, back, same = rows.get(fault, ["not measured yet", *[None] * 4])
        cells = [fault, ending, ended, repeated, back, {True: "yes", False: "NO"}.get(same)]
        lines.append("| " + " | ".join("-" if c is None else str(c) for c in cells) + " |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(json.loads(Path(sys.argv[1]).read_text())))
