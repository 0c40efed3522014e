"""The loop that studies share: trains what a list of runs names and no line has, and is resumed.

A study says which runs it knows so far.  The list may grow with the results: trials that follow
from others, or seeds of the best trial.  Every finished run is a line of OUT/runs.jsonl, which is
enough to go on with on another machine.  A run that was stopped goes on in its own folder.
"""

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from sparse_dataflow.cluster.processes import stopped_status
from sparse_dataflow.cluster.signals import stop_on_signals
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.loop import DivergedError
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import TrainingData
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.folders import FolderLock

from . import study
from .time_to_quality import bits_per_byte

LINES = "runs.jsonl"

Results = dict[str, dict]
"""Name of a run -> its result."""

Stop = Callable[[], object]
"""Returns whether to save and end."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of a study.

    Attributes:
      name: its key, and its folder relative to the study's.
      train: (its folder, cache of compiled programs) -> result; None if it was stopped.
      record: what its line says beside name and result.
      programs: equal for consecutive runs that share compiled programs.
    """

    name: str
    train: Callable[[Path, dict], dict | None]
    record: Mapping[str, object] = dataclasses.field(default_factory=dict)
    programs: Hashable = None


def resumable(folder: Path, body: Callable[[Stop], bool]) -> int:
    """Runs a study in its folder, and ends it cleanly on a signal.

    Args:
      folder: no other process may work in it.
      body: stop -> whether the study came to its end before `stop()`.

    Returns:
      The exit status.
    """
    with FolderLock(folder), stop_on_signals(say) as stop:
        if body(stop):
            return 0
        say("stopped; the same command goes on")
        return stopped_status(stop())


def train_all(
    folder: Path,
    known_runs: Callable[[Results], Iterable[Run]],
    lines: list[dict] | None = None,
    note: Callable[[Results], str] | None = None,
) -> Results | None:
    """Trains every run without a result, in the order of the list.

    Args:
      folder: of the study.
      known_runs: results so far -> the runs that are known so far, in order.
      lines: lines of runs.jsonl, if the study reads them in its own way.
      note: results so far -> what is said before a training.

    Returns:
      All results; None if a training was stopped.
    """
    lines = read_lines(folder / LINES) if lines is None else lines
    compiled: dict = {}
    previous: Run | None = None
    while True:
        results = {line["name"]: line["result"] for line in lines}
        run = next((r for r in known_runs(results) if r.name not in results), None)
        if run is None:
            return results
        result = study.read_result(folder / run.name)
        if result is None:
            if previous and (previous.programs is None or previous.programs != run.programs):
                # The programs of another model, which no later run has.  Each maps memory, and
                # XLA's compiler crashes after the 65,530 mappings that Linux gives a process.
                compiled.clear()
                jax.clear_caches()
            previous = run
            if note:
                say(note(results))
            result = run.train(folder / run.name, compiled)
        if result is None:
            return None
        lines.append({"name": run.name, **run.record, "result": result})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        storage.replace_text(folder / LINES, text)


def read_lines(path: Path) -> list[dict]:
    """Returns the lines of runs.jsonl; the folders of those runs are not needed any more.

    Raises:
      UserError: the file is damaged.
    """
    if not path.exists():
        return []
    try:
        lines = [json_files.parse(line) for line in path.read_text().splitlines()]
        for line in lines:
            bits_per_byte(line["result"])
            assert isinstance(line["name"], str)
    except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:
        raise UserError(
            f"{path} is damaged ({error!r}); remove it to make it anew from the runs' folders."
        ) from None
    return lines


def train_or_diverge(
    label: str, variant: Variant, data: TrainingData, where: Path, stop: Stop, **how: Any
) -> dict | None:
    """Trains as `study.train`; a training that diverges has a result too, whose
    "bits_per_byte" is None."""
    try:
        return study.train(label, variant, data, where, stop, keep_weights=False, **how)
    except DivergedError as error:
        say(f"{label}: {error}")
        training = variant.training
        tokens = training.steps * training.batch * training.sequence
        result = {"bits_per_byte": None, "tokens": tokens, "seconds": 0.0, "flops": 0.0}
        study.keep_result(where, result)
        return result
