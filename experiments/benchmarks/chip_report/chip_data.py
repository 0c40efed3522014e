"""Data of a chip report: what was measured on a chip, row by row, and its JSON."""

import dataclasses
import pathlib
from typing import Any

from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

from ..energy import UNKNOWN

DONE, FAILED, TIMED_OUT, NOT_RUN = "done", "failed", "timed out", "not run"
"""Statuses of a row."""

ANSWER = "block"
"""Name of the row that answers how much faster a block trains."""


@dataclasses.dataclass(frozen=True)
class ChipFacts:
    """The chip under a report.

    Attributes:
      name: as `hardware.detect` names it.
      platform: "cpu", "gpu" or "tpu".
      memory_bytes: device memory that programs may use; None if unknown.
      capability: compute capability of an NVIDIA GPU, e.g. "9.0"; "" for other chips.
      energy: what reports its energy, RAPL or NVML; else `energy.UNKNOWN`.
    """

    name: str
    platform: str
    memory_bytes: int | None
    capability: str = ""
    energy: str = UNKNOWN


@dataclasses.dataclass(frozen=True)
class Measure:
    """One figure of a row.

    Attributes:
      label: name of the comparison.
      ratio: dense time over sparse time; None for a figure in words.
      low: lower quartile of the ratio over rounds; None if unknown.
      high: upper quartile of the ratio over rounds; None if unknown.
      bound: the largest possible ratio; None if unknown.
      text: the figures behind the ratio, as a sentence.
    """

    label: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float | None = None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class RowResult:
    """Outcome of one row.

    Attributes:
      name: identifier of the row.
      title: what the row measures.
      command: its command line.
      status: one of the statuses of this module.
      measures: figures; those of a failed row may be incomplete.
      exit_status: of the process; None if it was stopped or never started.
      seconds: wall-clock time of the process.
      output: last lines of output of a row that is not done.
      date: ISO date and time of the end.
      versions: package -> version.
    """

    name: str
    title: str
    command: str
    status: str = NOT_RUN
    measures: tuple[Measure, ...] = ()
    exit_status: int | None = None
    seconds: float = 0.0
    output: str = ""
    date: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why the row is not done."""
        return {
            FAILED: f"it failed with status {self.exit_status}",
            TIMED_OUT: f"it was stopped after {self.seconds:.0f} s",
            NOT_RUN: "no time was left",
        }.get(self.status, "")


@dataclasses.dataclass(frozen=True)
class ChipReport:
    """Content of a chip report.

    Attributes:
      scale: named size of the block that answers.
      density: fraction of the blocks stored.
      command: command line of the last call.
      date: ISO date and time of the last change.
      versions: package -> version, of the last call.
      rows: outcomes, in order of importance.
    """

    chip: ChipFacts
    scale: str
    density: float
    command: str
    date: str
    versions: dict[str, str]
    rows: tuple[RowResult, ...] = ()

    def row(self, name: str) -> RowResult | None:
        """Returns the outcome of a row; None if there is none of this name."""
        return next((row for row in self.rows if row.name == name), None)

    def with_row(self, result: RowResult) -> "ChipReport":
        """Returns the report with another outcome of one row."""
        rows = tuple(result if row.name == result.name else row for row in self.rows)
        return dataclasses.replace(self, rows=rows)

    @property
    def answer(self) -> str:
        """The report in one sentence."""
        scale = self.scale.upper() if self.scale[0].isdigit() else self.scale
        subject = f"On this chip a {scale} block at 1/{1 / self.density:g}"
        row = self.row(ANSWER)
        if row is None or row.status != DONE:
            return f"{subject} was not measured: {row.reason if row else 'there is no such row'}."
        ratio = row.measures[0].ratio or 0.0
        if ratio < 1:
            return f"{subject} trains slower than dense: {ratio:.2f} times its speed."
        return f"{subject} trains {ratio:.1f} times faster than dense."


def to_json(report: ChipReport) -> dict[str, Any]:
    """Returns the report as JSON-able values, with its answer."""
    return {"answer": report.answer, **dataclasses.asdict(report)}


def read(path: pathlib.Path) -> ChipReport:
    """Returns the report of a file that `to_json` filled.

    Raises:
      UserError: the file is not such a report.
    """
    try:
        values = json_files.load(path)
        del values["answer"]
        rows = tuple(
            RowResult(**row | {"measures": tuple(Measure(**m) for m in row["measures"])})
            for row in values["rows"]
        )
        report = ChipReport(**values | {"chip": ChipFacts(**values["chip"]), "rows": rows})
        _check(report)
        return report
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is not a chip report ({error}); remove it to measure anew.") from (
            error
        )


def _check(report: ChipReport) -> None:
    """Raises an error of `json_files.MALFORMED` if a value has another type than its field."""
    for row in report.rows:
        numbers = [row.seconds]
        for measure in row.measures:
            ratios = (measure.ratio, measure.low, measure.high, measure.bound)
            numbers += [value for value in ratios if value is not None]
            if not isinstance(measure.label + measure.text, str):
                raise ValueError(f"row {row.name} has a label that is no text")
        if not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"row {row.name} has a figure that is no number")
    if not isinstance(report.answer + report.chip.name, str):
        raise ValueError("the chip has no name")
