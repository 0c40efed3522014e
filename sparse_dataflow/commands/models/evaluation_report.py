"""Formats an evaluation as text, and as a section of the run's report."""

import dataclasses
import json
from pathlib import Path

from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.evaluation.significance import METHOD
from sparse_dataflow.files import json_files, output, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.reporting.report import PAGE, write_report
from sparse_dataflow.reporting.report_data import EvaluationData, ReportData, evaluation_table

RESULT = "evaluation.json"
REPORT = "report.json"


def data(result: json_files.JsonObject) -> EvaluationData:
    """Converts the JSON of evaluation.json to the report's data."""
    rows = []
    for row in result["rows"]:
        models = {
            name: {key: model[key] for key in ("value", "error")}
            for name, model in row["models"].items()
        }
        kept = {key: value for key, value in row.items() if key != "item_documents"}
        rows.append({**kept, "models": models})
    return EvaluationData(
        list(result["models"]), rows, METHOD, list(result["notes"]), result["command"]
    )


def text(result: json_files.JsonObject) -> str:
    """Returns the table for a terminal, with its notes."""
    shown = data(result)
    first, *others = shown.models
    # Which model a difference is to goes without saying where there is one other.
    names = [f"- {name} (95%)" for name in others] if others[1:] else ["difference (95%)"]
    compared = [word for name in names[: len(others)] for word in (name, "p")]
    head = ["task", "", "", first, *others, *compared]
    lines = [[*head, "chance", "unigram", "bigram", "items", "documents"]]
    for row in evaluation_table(shown):
        differences = [
            word
            for other in row["differences"]
            for word in (
                f"{other['difference']} ({other['interval']})".removesuffix(" ()"),
                other["p"].removeprefix("p ").removeprefix("= "),
            )
        ]
        lines.append(
            [
                f"{row['task']}",
                row["shots"],
                row["metric"],
                *(f"{value} {error}".strip() for value, error in row["cells"]),
                *differences,
                *row["baselines"],
                row["items"],
                row["documents"],
            ]
        )
    footer = "± is a standard error; shares have their 95% interval by Wilson." + (
        f" {METHOD}" if others else ""
    )
    return "\n".join([output.aligned(lines, left=3), footer, *shown.notes])


def read(folder: Path, record: RunRecord) -> EvaluationData | None:
    """Reads the evaluation of a run after its last step; None if it is missing or damaged, or of
    another run or step."""
    try:
        result = json_files.load(folder / RESULT)
        first, *_ = result["models"].values()
        if (first["id"], first["step"]) != (record.identity, record.steps[first["variant"]]):
            return None
        evaluation = data(result)
        evaluation_table(evaluation)  # Raises for values that the report cannot show.
    except json_files.MALFORMED:
        return None
    return evaluation


def keep(folder: Path, result: json_files.JsonObject) -> Path:
    """Writes evaluation.json atomically and returns its path.

    Raises:
      UserError: the file cannot be written.
    """
    storage.replace_text(folder / RESULT, json.dumps(result, indent=1) + "\n")
    return folder / RESULT


def add_to_report(folder: Path, result: json_files.JsonObject) -> Path | None:
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
    storage.replace_text(path, json.dumps(report.to_json()) + "\n")
    write_report(report, folder / PAGE)
    return folder / PAGE
