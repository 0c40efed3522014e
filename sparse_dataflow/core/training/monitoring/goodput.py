"""Goodput: the fraction of a run's time, over all its starts, spent on steps that count.

Each start of the process is an attempt and appends rows to a file; the last row of an attempt
counts:

    {"attempt": 1, "began": ..., "elapsed": ..., "seconds": {activity: ...}, "ended": false}

`began` is the time of day in seconds since 1970, `elapsed` the seconds since then by a monotonic
clock, `seconds` the seconds by activity, and `ended` whether the process ended regularly.  The time
of day serves only for the idle time between two attempts, which is at least 0 if the clock was set
back.
"""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparse_dataflow.cluster import processes
from sparse_dataflow.cluster.clock import Clock
from sparse_dataflow.files import json_files, storage

NAME = "goodput.jsonl"
CATEGORIES = (
    "productive", "compile", "checkpoint", "data", "evaluation", "other", "lost",
)  # fmt: skip
"""Categories of a run's seconds.

productive: steps and layout updates that count; checkpoint: saving and restoring; data: waiting for
batches; other: starting and reporting; lost: steps repeated after a crash, and the time between the
last row before a crash and the next start.
"""

TRAINING = ("step", "evolution")
"""Activities of a clock in which the model is trained."""

_MAX_BYTES = 64 * 2**20
_EVERY_SECONDS = 5.0


class GoodputLog:
    """Writes the rows of this attempt, on process 0."""

    def __init__(self, folder: Path, clock: Clock):
        """Opens the file in the run folder, which may have rows of earlier attempts."""
        self._path, self._clock = folder / NAME, clock
        self._earlier = read(self._path) if processes.is_first() else []
        self._attempt = max((row["attempt"] for row in self._earlier), default=0) + 1
        self._began = time.time() - clock.elapsed
        self._written = float("-inf")

    def write(self, ended: bool = False, throttle: bool = False) -> None:
        """Appends a row; errors of the file system are ignored, so that they never end a run.

        Args:
          ended: whether the process ends regularly.
          throttle: write nothing if the last row is less than 5 seconds old.
        """
        now = self._clock.elapsed
        if not processes.is_first() or (throttle and now - self._written < _EVERY_SECONDS):
            return
        self._written = now
        try:
            with storage.open_regular(self._path, "ab") as file:
                # The newline ends an incomplete row of a killed attempt.
                file.write(b"\n" * (file.tell() > 0) + json.dumps(self._row(ended)).encode())
        except OSError as error:
            if not storage.is_transient(error):
                self._written = float("inf")

    def seconds(self, productive: float) -> dict[str, float]:
        """Returns {category: seconds} of the run so far; see `seconds_by_category`."""
        return seconds_by_category([*self._earlier, self._row(False)], productive)

    def _row(self, ended):
        seconds = {
            activity: round(s, 3) for activity, s in self._clock.seconds_by_activity().items()
        }
        return {
            "attempt": self._attempt,
            "began": round(self._began, 3),
            "elapsed": round(self._clock.elapsed, 3),
            "seconds": seconds,
            "ended": ended,
        }


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the last valid row of each attempt, in order; none without the file.

    Incomplete or foreign rows are skipped.
    """

    def content():
        with storage.open_regular(path) as file:
            return file.read(_MAX_BYTES)

    try:
        lines = storage.retry(f"Reading {path}", content).split(b"\n")
    except OSError:
        return []
    rows = {}
    for line in lines:
        try:
            row = json_files.parse(line)
            if _is_valid(row):
                rows[row["attempt"]] = row
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return [rows[attempt] for attempt in sorted(rows)]


def seconds_by_category(
    attempts: Iterable[Mapping[str, Any]], productive: float
) -> dict[str, float]:
    """Returns {category: seconds} for CATEGORIES; the sum is the time of the run.

    Args:
      attempts: rows as in the file, in order.
      productive: seconds of the steps that count; repeated steps count once.
    """
    totals = dict.fromkeys(CATEGORIES, 0.0)
    trained, before = 0.0, None
    for row in attempts:
        if before is not None and not before["ended"]:
            gap = row["began"] - before["began"] - before["elapsed"]
            totals["lost"] += max(0.0, gap)
        for activity, seconds in row["seconds"].items():
            if activity in TRAINING:
                trained += seconds
            else:
                totals[activity if activity in CATEGORIES else "other"] += seconds
        before = row
    totals["productive"] = min(productive, trained)
    totals["lost"] += trained - totals["productive"]
    return totals


def share(seconds: Mapping[str, float]) -> float:
    """Returns the goodput: productive seconds / all seconds, in [0, 1]."""
    return seconds["productive"] / max(sum(seconds.values()), 1e-9)


def summary(seconds: Mapping[str, float]) -> str:
    """Returns one line, such as "goodput 81%: productive 65 s, compile 9 s"."""
    items = [f"{name} {seconds[name]:.1f} s" for name in CATEGORIES if seconds[name] >= 0.05]
    return f"goodput {share(seconds):.0%}: {', '.join(items)}"


def _is_valid(row) -> bool:
    numbers = [row["began"], row["elapsed"], *row["seconds"].values()]
    return (
        type(row["attempt"]) is int
        and type(row["ended"]) is bool
        and all(isinstance(n, int | float) and 0 <= n < 1e12 for n in numbers)
    )
