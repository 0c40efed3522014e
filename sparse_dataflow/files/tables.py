"""Tables as Markdown, as aligned text and as CSV files."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def markdown(head: Sequence[str], rows: Iterable[Sequence]) -> str:
    """Returns a Markdown table."""
    first, *others = (f"| {' | '.join(map(str, line))} |" for line in (head, *rows))
    return "\n".join([first, f"|{'---|' * len(head)}", *others])


def aligned(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns lines of cells in columns: the first `left` columns flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows that have the same columns; at least one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
