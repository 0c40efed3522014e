"""Formats an evaluation as text, and as a section of the run's report."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparse_dataflow.evaluation.significance import METHOD
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.reporting.report import write_report
from sparse_dataflow.reporting.report_data import EvaluationData, EvaluationRow, ReportData

RESULT = "evaluation.json"
REPORT = "report.json"


def data(result: Mapping[str, Any]) -> EvaluationData:
    """Converts the JSON of evaluation.json to the report's data."""
    return EvaluationData(
        models=list(result["models"]),
        rows=[_row(row) for row in result["rows"]],
        method=METHOD,
        notes=list(result["notes"]),
        command=result["command"],
    )


def _row(row) -> EvaluationRow:
    shown = ("task", "shots", "metric", "lower_is_better", "items", "documents", "chance")
    return EvaluationRow(
        **{name: row[name] for name in shown},
        unigram=row["baselines"].get("unigram"),
        bigram=row["baselines"].get("bigram"),
        values={name: model["value"] for name, model in row["models"].items()},
        errors={name: model["error"] for name, model in row["models"].items()},
        **(row["paired"] or {}),
    )


def text(result: Mapping[str, Any]) -> str:
    """Returns the table for a terminal, with its notes."""
    # Imports matplotlib: slow, so only after an evaluation.
    from sparse_dataflow.reporting.page import evaluation_table

    shown = data(result)
    pair = len(shown.models) == 2
    head = ["task", "", *shown.models, *(["difference (95%)", "p"] if pair else [])]
    lines = [[*head, "chance", "unigram", "bigram", "items", "documents"]]
    for row, cells in zip(shown.rows, evaluation_table(shown)):
        compared = []
        if pair:
            interval = f" ({cells['interval']})" if cells["interval"] else ""
            compared = [
                f"{cells['difference']}{interval}",
                cells["p"].removeprefix("p ").removeprefix("= "),
            ]
        lines.append(
            [
                f"{row.task}",
                cells["shots"] or row.metric,
                *(f"{value} {error}".strip() for value, error in cells["cells"]),
                *compared,
                *cells["baselines"],
                f"{row.items:,}",
                f"{row.documents:,}",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    table = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths)))
        for line in lines
    ]
    footer = [*(["± is a standard error. " + METHOD] if pair else ["± is a standard error."])]
    return "\n".join([*table, *footer, *shown.notes])


def read(folder: Path) -> EvaluationData | None:
    """Reads the evaluation of a run folder; None if it is missing or damaged."""
    try:
        return data(json_files.load(folder / RESULT))
    except json_files.MALFORMED:
        return None


def keep(folder: Path, result: Mapping[str, Any]) -> Path:
    """Writes evaluation.json atomically and returns its path.

    Raises:
      UserError: the file cannot be written.
    """
    return _replace(folder / RESULT, json.dumps(result, indent=1))


def add_to_report(folder: Path, result: Mapping[str, Any]) -> Path | None:
    """Rewrites the run's report with this evaluation; returns None if the run has no report.

    Raises:
      UserError: report.json is damaged, or the report cannot be written.
    """
    path = folder / REPORT
    if not path.exists():
        return None
    try:
        fields = dict(json_files.load(path)) | {"evaluation": None}
        report = ReportData.from_json(fields)
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is damaged ({error}); resume the run to write it again.") from None
    report = dataclasses.replace(report, evaluation=data(result))
    _replace(path, json.dumps(report.to_json()))
    write_report(report, folder / "report.html")
    return folder / "report.html"


def _replace(path, content) -> Path:
    try:
        storage.replace(path, f"{content}\n".encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path
