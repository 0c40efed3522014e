"""Goodput: the share of a run's time, over all its starts, that went into steps which it kept.

The file holds one row a moment, the last of each attempt (a start of the process) counts:

    {"attempt": 1, "began": ..., "elapsed": ..., "seconds": {phase: ...}, "ended": false}

`began` is the time of day in seconds since 1970, `elapsed` the seconds since then by a clock that
never jumps, and `seconds` what they were spent on; `ended` is true where the process ended in
order.  The time of day is used for one thing only, how long nothing ran between two attempts, and a
clock that was set back makes that zero.
"""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparse_dataflow.distributed import processes
from sparse_dataflow.distributed.clock import Clock
from sparse_dataflow.files import json_files, storage

NAME = "goodput.jsonl"
CATEGORIES = (
    "productive", "compile", "checkpoint", "data", "evaluation", "other", "lost",
)  # fmt: skip
"""Seconds by what they were spent on: steps and layout updates that count; compiling; saving and
restoring; waiting for batches; evaluating; starting and reporting; and lost, which is steps made
again after a crash, and the time from its last sign to the next start."""

STEPS = ("step", "evolution")
"""Phases of a clock in which the model is trained."""

_MOST_BYTES = 64 * 2**20
_EVERY_SECONDS = 5.0


class Ledger:
    """Writes the rows of this attempt; of several processes, the first."""

    def __init__(self, folder: Path, clock: Clock):
        """Goes on with the file in the run folder `folder`."""
        self._path, self._clock = folder / NAME, clock
        self._before = read(self._path) if processes.is_first() else []
        self._attempt = max((row["attempt"] for row in self._before), default=0) + 1
        self._began = time.time() - clock.elapsed
        self._written = float("-inf")

    def note(self, ended: bool = False, at_once: bool = True) -> None:
        """Writes how things stand; unless `at_once`, only where the last row is some seconds old.

        A file that cannot be written is passed over: it is not worth the run.
        """
        now = self._clock.elapsed
        if not processes.is_first() or (now - self._written < _EVERY_SECONDS and not at_once):
            return
        self._written = now
        try:
            with self._path.open("a", encoding="utf-8") as file:
                # A torn row of a killed attempt stays a line of its own.
                file.write("\n" * (file.tell() > 0) + json.dumps(self._row(ended)))
        except OSError as error:
            if not storage.is_transient(error):
                self._written = float("inf")

    def seconds(self, kept: float) -> dict[str, float]:
        """{category: seconds} of the whole run so far; `kept` are those of steps that count."""
        return account([*self._before, self._row(False)], kept)

    def _row(self, ended):
        spent = {
            phase: round(seconds, 3) for phase, seconds in self._clock.seconds_by_activity().items()
        }
        return {
            "attempt": self._attempt,
            "began": round(self._began, 3),
            "elapsed": round(self._clock.elapsed, 3),
            "seconds": spent,
            "ended": ended,
        }


def read(path: Path) -> list[dict[str, Any]]:
    """The last whole row of each attempt, in order; none where there is no such file.

    Rows that are torn, or that no run wrote, are passed over.
    """

    def content():
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)

    try:
        lines = storage.retry(f"Reading {path}", content).split(b"\n")
    except OSError:
        return []
    rows = {}
    for line in lines:
        try:
            row = json_files.parse(line)
            if _whole(row):
                rows[row["attempt"]] = row
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return [rows[attempt] for attempt in sorted(rows)]


def account(attempts: Iterable[Mapping[str, Any]], kept: float) -> dict[str, float]:
    """{category: seconds} of CATEGORIES, which add up to the time of the run.

    Args:
      attempts: rows as in the file, in order.
      kept: seconds of the steps that count, those made again counted once.
    """
    found = dict.fromkeys(CATEGORIES, 0.0)
    stepped, before = 0.0, None
    for row in attempts:
        if before is not None and not before["ended"]:
            gap = row["began"] - before["began"] - before["elapsed"]
            found["lost"] += max(0.0, gap)
        for phase, seconds in row["seconds"].items():
            if phase in STEPS:
                stepped += seconds
            else:
                found[phase if phase in CATEGORIES else "other"] += seconds
        before = row
    found["productive"] = min(kept, stepped)
    found["lost"] += stepped - found["productive"]
    return found


def share(seconds: Mapping[str, float]) -> float:
    """Goodput: the productive part of the time, a fraction of one."""
    return seconds["productive"] / max(sum(seconds.values()), 1e-9)


def told(seconds: Mapping[str, float]) -> str:
    """One line, such as "goodput 81%: productive 65 s, compile 9 s"."""
    parts = [f"{name} {seconds[name]:.1f} s" for name in CATEGORIES if seconds[name] >= 0.05]
    return f"goodput {share(seconds):.0%}: {', '.join(parts)}"


def _whole(row) -> bool:
    numbers = [row["began"], row["elapsed"], *row["seconds"].values()]
    return (
        type(row["attempt"]) is int
        and type(row["ended"]) is bool
        and all(isinstance(n, int | float) and 0 <= n < 1e12 for n in numbers)
    )
