"""What a storm has shown so far: a line for each draw, a file for each fault, and a summary."""

import collections
import json
from pathlib import Path

from storm.case import Case
from storm.checking import HOLDS, INAPPLICABLE
from storm.drawing import NOT_DRAWN
from storm.scene import TABLE

DRAWS, FAULTS = "draws.jsonl", "faults.jsonl"
_SHOWN = 1500


def command(relation: str, case: Case) -> str:
    """Returns the command that checks a relation of a case."""
    return f'make storm ARGS="--only={relation} {str(case) or "--default"}"'


class Records:
    """The records of a storm, in its folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.draws = _lines(folder / DRAWS)
        self.faults = _lines(folder / FAULTS)

    @property
    def next_number(self) -> int:
        """The number of the next draw."""
        return max((row["number"] for row in self.draws), default=-1) + 1

    def add_draw(self, row: dict) -> None:
        """Adds a draw."""
        self._append(DRAWS, self.draws, row)

    def add_fault(self, row: dict) -> None:
        """Adds a fault."""
        self._append(FAULTS, self.faults, row)

    def _append(self, name, rows, row):
        rows.append(row)
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def summary(self) -> str:
        """Returns draws, faults by relation, how often each relation was checked, and what was
        never drawn."""
        results: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        seen: collections.Counter = collections.Counter()
        refused = 0
        for row in self.draws:
            for name, result in row["results"].items():
                results[name][result] += 1
            seen.update(path for path, _ in Case.parsed(row["case"]).changes)
            refused += row["results"].get("refusals_leave_nothing") == HOLDS
        seconds = sum(row["seconds"] for row in self.draws)
        kinds = {(row["relation"], row["shrunk"]) for row in self.faults}
        clean = 0
        for row in reversed(self.draws):
            if row["wrong"]:
                break
            clean += 1
        lines = [
            f"{len(self.draws)} draws in {seconds:,.0f} s of the processor, {refused} of them "
            f"refused; {len(self.faults)} faults, {len(kinds)} of them different; the last "
            f"{clean} draws have none",
            "",
            f"{'relation':<52}{'holds':>7}{'wrong':>7}{'says nothing':>14}",
        ]
        for name in sorted(results):
            counts = results[name]
            lines.append(
                f"{name:<52}{counts[HOLDS]:>7}{counts['wrong']:>7}{counts[INAPPLICABLE]:>14}"
            )
        never = [path for path in TABLE if path not in seen and path not in NOT_DRAWN]
        lines += ["", f"never drawn yet: {', '.join(never) or 'none'}"]
        lines += [f"not drawn: {path}, as it {why}" for path, why in NOT_DRAWN.items()]
        for (name, _), row in {
            (row["relation"], row["shrunk"]): row for row in self.faults
        }.items():
            words = row["words"].partition("\n")[0]
            lines += ["", f"{name}: {words[:_SHOWN]}", f"    {row['command']}"]
        return "\n".join(lines)


def _lines(path):
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
