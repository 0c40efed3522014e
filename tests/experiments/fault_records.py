"""What the fault tests measured, as the table in BUILD.md.

    python tests/experiments/fault_records.py tests/experiments/faults.json

prints the rows; `make faults` makes the file anew.
"""

import json
import os
import sys
from pathlib import Path

FILE = Path(__file__).with_name("faults.json")
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
    if not (path := os.environ.get("FAULTS")):
        return
    path = Path(path)
    rows = json.loads(path.read_text()) if path.exists() else {}
    seconds = [None if value is None else round(value, 1) for value in (ended, back)]
    rows[fault] = [ending, seconds[0], repeated, seconds[1], same]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows):
    """The rows as Markdown."""
    lines = []
    for fault, (ending, ended, repeated, back, same) in rows.items():
        cells = [fault, ending, ended, repeated, back, "yes" if same else "NO"]
        lines.append("| " + " | ".join("-" if c is None else str(c) for c in cells) + " |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(json.loads(Path(sys.argv[1]).read_text())))
